// The worker's evidence, compiled: what evidence.py books of a simulated pod, names included, for
// many sequences at once, as they share a step and so its gap; and the totals of recording.py.
// Fields of Config, Tick, Totals and Ended are in the order of layout.py.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

enum Cause { CAP, KV, PREFILL, COLD, NONE };

struct Config {
  double a, b, c, d, between_ms, leak_per_hour, interference_factor;
  double ttft_ms, itl_ms, e2e_ms;  // infinity: no target
  double start_s, tick_s, refit_s, log_gamma, smallest_ms, smooth_share;
  double at_cap_share;
  int64_t cap, epoch, num_blocks, block_size, caching, max_num_batched_tokens, max_num_queued;
  int64_t min_chunk, has_interference;
};

struct Tick {
  double t_s, busy_s;
  int64_t epoch, settled, max_num_seqs, arrivals, refused, finished, good, smooth;
  int64_t ttft_n, ttft_over, by[4], itl_n, itl_over, over_after_over, n_at_cap, over_at_cap;
  int64_t e2e_n, e2e_over, steps, slow_steps, decodes, prefill_tokens, generated_tokens;
  int64_t running, max_running, waiting_cap, waiting_kv;
  int64_t num_ttft, num_itl, num_e2e;  // pairs of its sketches, in this order
};

struct Totals {  // of closed ticks
  int64_t num_gaps, num_gaps_over, most_running;
};

struct Ended {  // first_s: infinite before the first token
  double t_s, first_s, last_s;
  int64_t num_tokens, num_gaps_over;
};

struct Sketch {
  static constexpr int OFFSET = 512, SIZE = 2560;
  std::vector<int64_t> counts = std::vector<int64_t>(SIZE);
  int low = SIZE, high = -1;
  void add(int index, int64_t count) {
    index = std::clamp(index + OFFSET, 0, SIZE - 1);
    counts[index] += count;
    low = std::min(low, index), high = std::max(high, index);
  }
  int64_t move_to(std::vector<int64_t>& pairs) {  // appends them and leaves it empty
    int64_t num = 0;
    for (int i = low; i <= high; i++) {
      if (!counts[i]) continue;
      pairs.push_back(i - OFFSET), pairs.push_back(counts[i]);
      counts[i] = 0, num++;
    }
    low = SIZE, high = -1;
    return num;
  }
};

struct Clocks {
  double cap_s = 0, kv_s = 0;
};

struct Job {  // with its flight; while it decodes, before step s it has `base` + s tokens
  double t_s, first_s = INFINITY, last_s = 0, admitted_s = NAN;
  int64_t prompt, max_tokens, tokens, computed = 0, trusted = 0, generated = 0;
  int64_t num_blocks = 0, run = -1;  // run: of its own sealed blocks, among `runs`
  int64_t base = 0, joined_at = 0, ends_at = 0, first_growth = 0, slow_before = 0;
  int64_t num_tokens = 0, num_gaps_over = 0;
  double wait_cap_s = 0, wait_kv_s = 0;
  Clocks queued_at;
  bool is_decoding = false, is_waiting = true, is_pending = true;
  bool decided = false, whole_decided = false, has_ended = false;
  bool held_first = false, last_was_over = false;
};

struct Chunk {
  int id;
  int64_t num_tokens;
};

struct Step {
  bool is_under_way = false, at_cap = false;
  double started_s = 0, ends_s = 0, step_ms = 0;
  int64_t epoch = 0, decodes = 0, kv_tokens = 0, prefill = 0, num_running = 0;
  std::vector<Chunk> chunks;
  size_t num_whole = 0;  // so many of them lacked one token, as decodes do
  std::vector<int> begun;
};

struct Recorder {
  const Config& config;
  std::vector<Job>& jobs;
  std::vector<Tick> ticks;
  std::vector<int64_t> pairs, lengths;
  Sketch ttft, itl, e2e, all_gaps;
  Totals totals{};
  Tick tick{};
  double tick_start_s;
  int64_t epoch, cap, running = 0, waiting_cap = 0, waiting_kv = 0;
  bool is_mixed = true, is_settling = false;
  Cause last_lack = CAP;
  int64_t before = 0, after = 0;  // of the change that has not taken effect yet
  size_t first_waiting = 0, first_pending = 0, first_open = 0;

  Recorder(const Config& c, std::vector<Job>& j)
      : config(c), jobs(j), tick_start_s(c.start_s), epoch(c.epoch), cap(c.cap) {}

  int bucket(double ms) const {
    return (int)std::ceil(std::log(std::max(ms, config.smallest_ms)) / config.log_gamma);
  }
  void configure(int64_t new_epoch, int64_t new_cap) {
    if (new_epoch == epoch && new_cap == cap) return;
    bool goes_on = is_settling && (new_cap == after || after < before);
    is_mixed = is_settling = true;
    before = goes_on ? before : cap, after = new_cap;
    epoch = new_epoch, cap = new_cap;
  }
  void settle(int64_t num_running) {
    bool is_over = after < before ? num_running <= after : after == before || num_running > before;
    if (is_settling && is_over) is_settling = false;
  }

  void arrive() { tick.arrivals++; }
  void refuse() {
    tick.arrivals++, tick.refused++;
    miss(waiting_cause());
    if (std::isfinite(config.e2e_ms)) tick.e2e_n++, tick.e2e_over++;
  }
  void miss(Cause cause) { tick.ttft_n++, tick.ttft_over++, tick.by[cause]++; }
  Cause waiting_cause() const { return waiting_kv > waiting_cap ? KV : CAP; }
  void leave(Job& job) {
    job.is_waiting = job.is_pending = false;
  }
  Cause cause_so_far(const Job& job, double now_s) const {
    if (job.is_waiting || std::isnan(job.admitted_s))
      return has_begun(job) ? PREFILL : waiting_cause();
    double waited_s = job.admitted_s - job.t_s, prefill_s = now_s - job.admitted_s;
    return prefill_s >= waited_s ? PREFILL : last_lack;
  }
  bool has_begun(const Job& job) const {  // its first step runs: behind those that wait nobody has
    if (!job.is_waiting || waiting_cap + waiting_kv) return false;
    int64_t before = 0;
    for (size_t i = first_waiting; &jobs[i] != &job; i++) before += jobs[i].is_waiting;
    return before < cap - running;
  }
  static Cause largest_part(const Job& job, double prefill_s, double ttft_s) {
    double cold_s = ttft_s - job.wait_cap_s - job.wait_kv_s - prefill_s;
    double parts[] = {job.wait_cap_s, job.wait_kv_s, prefill_s, cold_s};
    return (Cause)(std::max_element(parts, parts + 4) - parts);
  }
  void first_token(Job& job, double now_s, double prefill_s) {
    leave(job);
    double ttft_s = now_s - job.t_s;
    job.first_s = job.last_s = now_s;
    job.num_tokens = 1;
    bool is_over = job.decided || ttft_s * 1e3 > config.ttft_ms;
    job.held_first = !is_over;
    ttft.add(bucket(ttft_s * 1e3), 1);
    if (job.decided) return;
    job.decided = true;
    if (is_over) {
      miss(largest_part(job, prefill_s, ttft_s));
    } else {
      tick.ttft_n++;
    }
  }
  void next_token(Job& job, double now_s, bool at_cap) {
    double gap_ms = (now_s - job.last_s) * 1e3;
    job.last_s = now_s;
    job.num_tokens++;
    bool is_over = gaps(1, gap_ms, at_cap, job.last_was_over);
    job.num_gaps_over += is_over;
    job.last_was_over = is_over;
  }
  bool gaps(int64_t count, double gap_ms, bool at_cap, int64_t after_over) {
    tick.itl_n += count;
    itl.add(bucket(gap_ms), count);
    if (at_cap) tick.n_at_cap += count;
    bool is_over = gap_ms > config.itl_ms;
    if (is_over) {
      tick.itl_over += count;
      tick.over_at_cap += count * at_cap;
      tick.over_after_over += after_over;
    }
    return is_over;
  }
  void finish(Job& job, double now_s) {
    leave(job);
    double e2e_ms = (now_s - job.t_s) * 1e3;
    tick.finished++;
    job.has_ended = true;
    e2e.add(bucket(e2e_ms), 1);
    bool is_late = job.whole_decided || e2e_ms > config.e2e_ms;
    if (!job.whole_decided) tick.e2e_n++, tick.e2e_over += is_late;
    lengths.push_back(job.prompt + job.num_tokens);
    if (!job.held_first || is_late) return;
    int64_t num_gaps = job.num_tokens - 1;
    double mean_ms = num_gaps < 1 ? 0.0 : (job.last_s - job.first_s) * 1e3 / num_gaps;
    tick.good += mean_ms <= config.itl_ms;
    tick.smooth += job.num_gaps_over <= (int64_t)std::floor(num_gaps * config.smooth_share);
  }
  void stepped(const Step& step, int64_t num_tokens, size_t num_running, int64_t by_cap,
               int64_t by_kv, bool is_slow) {
    double step_s = step.step_ms / 1e3;
    tick.steps++, tick.slow_steps += is_slow;
    tick.decodes += step.decodes, tick.prefill_tokens += step.prefill;
    tick.generated_tokens += num_tokens;
    tick.busy_s += step_s;
    tick.max_running = std::max(tick.max_running, step.num_running);
    running = num_running, waiting_cap = by_cap, waiting_kv = by_kv;
    if (by_cap + by_kv) last_lack = waiting_cause();
    for (int id : step.begun) admit(jobs[id], step.started_s);
    if (step.epoch == epoch) settle(step.num_running);
  }
  void admit(Job& job, double step_start_s) {
    if (!job.is_waiting) return;
    job.is_waiting = false;
    job.admitted_s = std::max(job.t_s, step_start_s);
    while (first_waiting < jobs.size() && !jobs[first_waiting].is_waiting) first_waiting++;
  }

  void advance(double now_s) {
    while (now_s - tick_start_s >= config.tick_s) {
      double end_s = tick_start_s + config.tick_s;
      count_late(end_s);
      if (is_settling && after <= before) settle(running);  // an idle engine sends no steps
      close(now_s - (now_s - end_s));
      tick_start_s = end_s;
    }
  }
  void count_late(double end_s) {
    while (first_pending < jobs.size() && !jobs[first_pending].is_pending) first_pending++;
    for (size_t i = first_pending; i < jobs.size(); i++) {
      if (!jobs[i].is_pending) continue;
      if ((end_s - jobs[i].t_s) * 1e3 <= config.ttft_ms) break;
      if (jobs[i].decided) continue;
      jobs[i].decided = true;
      miss(cause_so_far(jobs[i], end_s));
    }
    while (first_open < jobs.size() && jobs[first_open].has_ended) first_open++;
    for (size_t i = first_open; i < jobs.size(); i++) {
      if ((end_s - jobs[i].t_s) * 1e3 <= config.e2e_ms) break;
      if (jobs[i].has_ended || jobs[i].whole_decided) continue;
      jobs[i].whole_decided = true;
      tick.e2e_n++, tick.e2e_over++;
    }
  }
  void close(double wall_s) {
    tick.t_s = std::max(0.0, wall_s);
    tick.epoch = epoch, tick.max_num_seqs = cap;
    tick.settled = !is_mixed && !is_settling;
    tick.running = running, tick.waiting_cap = waiting_cap, tick.waiting_kv = waiting_kv;
    tick.num_ttft = ttft.move_to(pairs);
    size_t begin = pairs.size();
    tick.num_itl = itl.move_to(pairs);
    for (size_t i = begin; i < pairs.size(); i += 2) all_gaps.add(pairs[i], pairs[i + 1]);
    tick.num_e2e = e2e.move_to(pairs);
    totals.num_gaps += tick.itl_n, totals.num_gaps_over += tick.itl_over;
    totals.most_running = std::max(totals.most_running, tick.max_running);
    ticks.push_back(tick);
    tick = Tick{};
    is_mixed = is_settling;
  }
};
