// `pod.Pod` by arrival, without prefixes and shedding, compiled: the same steps, in the same order
// of floating point operations (built without contraction), so that a test can ask for equal ticks.
// Names and the reasons for what is done are those of the worker's scheduler, preemption and
// engine, but a step costs the same however many decode. Each of them gets one token in it, so when
// it ends and when it needs its next block is known as it begins to. Blocks are counted, not named:
// those that a sequence gave back are only ever found by itself, and are given up from their end.
// Called through ctypes; fields of View are in the order of layout.py.
#include <deque>
#include <limits>
#include <map>
#include <set>

#include "recording.h"
#include "steptimes.h"

namespace {

enum Need : int64_t { NOTHING, FACTORS, INTERFERENCE };

struct View {  // what is read after each `run`
  int64_t num_open, running, waiting_cap, waiting_kv, num_refused, num_preemptions, num_ticks;
  int64_t num_lengths;
  StepModel model;
};

struct Arrival {
  double t_s;
  int64_t prompt, max_tokens;
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
int64_t blocks_for(int64_t tokens, int64_t size) { return (tokens + size - 1) / size; }

struct Pages {
  int64_t num_total, size, num_free, num_cached = 0;
  bool caching;
  std::vector<int64_t> runs;  // unused blocks of each that was released, oldest first
  size_t oldest = 0;

  int64_t available() const { return num_free + num_cached; }
  int64_t own_match(const Job& job) const { return job.run < 0 ? 0 : runs[job.run]; }
  void start(Job& job, int64_t own, int64_t num_blocks) {
    if (own) num_cached -= own, runs[job.run] = 0;
    job.run = -1;
    job.num_blocks = num_blocks;
    take(num_blocks - own);
  }
  void take(int64_t count) {
    int64_t free = std::min(count, num_free);
    num_free -= free, count -= free;
    num_cached -= count;
    while (count) {
      int64_t given = std::min(runs[oldest], count);
      runs[oldest] -= given, count -= given;
      if (!runs[oldest]) oldest++;
    }
  }
  void release(Job& job) {
    int64_t own = caching ? job.trusted / size : 0;
    num_free += job.num_blocks - own;
    if (own) {
      job.run = runs.size();
      runs.push_back(own);
      num_cached += own;
    }
    job.num_blocks = 0;
  }
};

struct Pod {
  Config config;
  std::vector<Job> jobs;
  Pages pages;
  Recorder recorder;
  StepTimes times;
  std::deque<Arrival> arrivals;
  std::deque<double> factors, interference;  // interference: start, end, start, end, ...
  std::vector<int> inbox, prefilling, joined, done;
  std::deque<int> waiting;
  std::set<int> running;
  std::map<int64_t, std::set<int>> ends;  // in order of arrival
  std::vector<int64_t> growing;
  Step step;
  View view{};
  double now, last_end, clock_at, refitted_at;
  int64_t cap, epoch, num_steps = 1, num_decoding = 0, kv_tokens = 0, num_slow = 0;
  bool last_was_slow = false;
  Cause blocked_by = NONE;
  Clocks clocks;

  Pod(const Config& c, const Row* anchor, int64_t num_anchor, const Fit& fit)
      : config(c), pages{c.num_blocks, c.block_size, c.num_blocks, 0, c.caching != 0, {}, 0},
        recorder(config, jobs), times(anchor, num_anchor, fit), growing(c.block_size),
        now(c.start_s), last_end(c.start_s), clock_at(c.start_s), refitted_at(c.start_s),
        cap(c.cap), epoch(c.epoch) {}

  Need run(double until_s) {
    while (true) {
      if (!step.is_under_way) {
        if (running.empty() && waiting.empty() && inbox.empty()) {
          if (arrivals.empty() || arrivals[0].t_s > until_s) break;
          now = std::max(now, arrivals[0].t_s);
          receive();
          continue;
        }
        if (factors.empty()) return FACTORS;
        if (config.has_interference && (interference.empty() || now >= interference.back())) return INTERFERENCE;
        begin(now);
        continue;
      }
      while (!arrivals.empty() && arrivals[0].t_s <= std::min(step.ends_s, until_s)) receive();
      if (step.ends_s > until_s) break;
      end();
    }
    recorder.advance(until_s);
    return NOTHING;
  }

  void patch(int64_t new_cap, int64_t new_epoch, double now_s) {
    recorder.advance(now_s);
    cap = new_cap, epoch = new_epoch;
    recorder.configure(epoch, cap);
  }

  void receive() {
    Arrival request = arrivals.front();
    arrivals.pop_front();
    recorder.advance(request.t_s);
    int64_t total = blocks_for(request.prompt + request.max_tokens, pages.size);
    if (total > pages.num_total || is_full()) {
      recorder.refuse();
      view.num_refused++;
      return;
    }
    inbox.push_back(jobs.size());
    Job job{};
    job.t_s = request.t_s;
    job.prompt = job.tokens = request.prompt;
    job.max_tokens = request.max_tokens;
    jobs.push_back(job);
    recorder.arrive();
    view.num_open++;
  }
  bool is_full() const {
    int64_t wait = recorder.waiting_cap + recorder.waiting_kv, limit = config.max_num_queued;
    return view.num_open + 1 - cap > limit || (wait > 0 && wait + 1 > limit);
  }

  // A step

  void begin(double now_s) {
    advance_clocks(now_s);
    for (int id : inbox) {
      jobs[id].queued_at = clocks;
      waiting.push_back(id);
    }
    inbox.clear();
    int64_t before = view.num_preemptions;
    std::vector<Chunk>& chunks = step.chunks;
    chunks.clear();
    step.begun.clear();
    for (int id : prefilling)
      if (jobs[id].tokens - jobs[id].computed == 1) chunks.push_back({id, 1});
    if (num_decoding) grow();
    const bool is_short = view.num_preemptions > before;
    if (is_short) {
      auto is_gone = [&](const Chunk& chunk) { return !jobs[chunk.id].num_blocks; };
      chunks.erase(std::remove_if(chunks.begin(), chunks.end(), is_gone), chunks.end());
    }
    int64_t decodes = num_decoding + chunks.size(), kv = kv_tokens;
    for (const Chunk& chunk : chunks) kv += jobs[chunk.id].tokens;
    const int64_t budget = prefill_budget(decodes, kv);
    if (!is_short) admit_by_arrival();
    bool is_full = (int64_t)running.size() >= cap;
    blocked_by = is_full ? CAP : waiting.empty() ? NONE : KV;
    add_chunks(budget);
    if (!chunks.empty() || num_decoding) start_step(now_s);
  }
  int64_t prefill_budget(int64_t decodes, int64_t kv) const {
    int64_t left = std::max<int64_t>(config.max_num_batched_tokens - decodes, 1);
    int64_t fits = times.chunk_limit(config.itl_ms, decodes, kv);
    return std::min(left, std::max(fits, config.min_chunk));
  }
  void add_chunks(int64_t budget) {
    step.num_whole = step.chunks.size();
    for (int id : prefilling) {
      if (budget <= 0) break;
      if (is_served_whole(id)) continue;
      int64_t num_tokens = std::min(jobs[id].tokens - jobs[id].computed, budget);
      budget -= num_tokens;
      step.chunks.push_back({id, num_tokens});
    }
    auto is_one = [](const Chunk& chunk) { return chunk.num_tokens == 1; };
    std::stable_partition(step.chunks.begin() + step.num_whole, step.chunks.end(), is_one);
  }
  bool is_served_whole(int id) const {
    auto is_it = [&](const Chunk& chunk) { return chunk.id == id; };
    auto first = step.chunks.begin();
    return std::any_of(first, first + step.num_whole, is_it);
  }
  void start_step(double now_s) {
    int64_t decodes = num_decoding, kv = kv_tokens, prefill = 0;
    for (const Chunk& chunk : step.chunks) {
      kv += jobs[chunk.id].computed + chunk.num_tokens;
      (chunk.num_tokens == 1 ? decodes : prefill) += chunk.num_tokens;
    }
    double mean_ms = config.a + config.b * decodes + config.c * kv + config.d * prefill;
    step.step_ms = mean_ms * factor(now_s);
    step.started_s = now_s;
    step.ends_s = now_s + (step.step_ms + config.between_ms) / 1e3;
    step.epoch = epoch, step.decodes = decodes, step.kv_tokens = kv, step.prefill = prefill;
    step.num_running = running.size();
    step.at_cap = step.num_running >= config.at_cap_share * cap;
    step.is_under_way = true;
  }
  double factor(double now_s) {
    double factor = factors.front();
    factors.pop_front();
    if (config.has_interference) {
      while (now_s >= interference[1]) interference.erase(interference.begin(), interference.begin() + 2);
      factor *= now_s >= interference[0] ? config.interference_factor : 1.0;
    }
    return factor * (1 + config.leak_per_hour * now_s / 3600);
  }

  void end() {
    double now_s = step.ends_s;
    recorder.advance(now_s);
    advance_clocks(now_s);
    now = now_s, step.is_under_way = false;
    int64_t num_tokens = num_decoding;
    std::vector<int> newcomers;
    newcomers.swap(joined);
    std::vector<int> ending;
    if (num_tokens) ending = book_decodes(newcomers);
    auto at = ending.begin();
    for (size_t i = 0; i < step.chunks.size(); i++) {
      const Chunk& chunk = step.chunks[i];
      while (at != ending.end() && (*at < chunk.id || i >= step.num_whole))
        finish(*at++, now_s);
      Job& job = jobs[chunk.id];
      job.computed += chunk.num_tokens;
      if (job.computed != job.tokens) continue;
      num_tokens++;
      sample(chunk.id, now_s);
    }
    while (at != ending.end()) finish(*at++, now_s);
    last_end = now_s;
    num_steps++;
    times.add({now_s, (double)step.decodes, (double)step.kv_tokens, (double)step.prefill,
               std::max(step.step_ms, 1e-3)});
    if (now_s - refitted_at >= config.refit_s) {
      refitted_at = now_s;
      times.refit(now_s);
    }
    int64_t num_waiting = waiting.size(), by_cap = blocked_by == CAP ? num_waiting : 0;
    int64_t by_kv = blocked_by == KV ? num_waiting : 0;
    recorder.stepped(step, num_tokens, running.size(), by_cap, by_kv, times.is_slow());
  }
  std::vector<int> book_decodes(const std::vector<int>& newcomers) {  // those that end with it
    int64_t after_over = 0, num_new = 0;
    for (int id : newcomers) {
      if (!jobs[id].is_decoding) continue;
      num_new++;
      after_over += jobs[id].last_was_over;
    }
    if (last_was_slow) after_over += num_decoding - num_new;
    double gap_ms = (step.ends_s - last_end) * 1e3;
    last_was_slow = recorder.gaps(num_decoding, gap_ms, step.at_cap, after_over);
    num_slow += last_was_slow;
    kv_tokens += num_decoding;
    while (!ends.empty() && ends.begin()->first < num_steps) ends.erase(ends.begin());
    std::vector<int> ending;
    if (ends.empty() || ends.begin()->first != num_steps) return ending;
    for (int id : ends.begin()->second) {
      Job& job = jobs[id];
      if (job.ends_at != num_steps || !job.is_decoding) continue;
      leave_decoding(job, num_steps + 1);
      job.last_s = step.ends_s;
      ending.push_back(id);
    }
    ends.erase(ends.begin());
    return ending;
  }
  void sample(int id, double now_s) {
    Job& job = jobs[id];
    job.trusted = job.computed;
    job.tokens++;
    if (++job.generated == 1) {
      double waited_s = job.wait_cap_s + job.wait_kv_s;
      recorder.first_token(job, now_s, now_s - job.t_s - waited_s);
    } else {
      recorder.next_token(job, now_s, step.at_cap);
    }
    prefilling.erase(std::find(prefilling.begin(), prefilling.end(), id));
    if (job.generated == job.max_tokens) {
      finish(id, now_s);
    } else {
      join(id);
    }
  }
  void join(int id) {
    Job& job = jobs[id];
    num_decoding++;
    kv_tokens += job.tokens;
    job.is_decoding = true, job.joined_at = num_steps;
    job.base = job.tokens - num_steps - 1;
    job.ends_at = num_steps + job.max_tokens - job.generated;
    ends[job.ends_at].insert(id);
    job.slow_before = num_slow;
    joined.push_back(id);
    job.first_growth = job.num_blocks * pages.size - job.base + 1;
    growing[job.first_growth % pages.size]++;
  }
  void leave_decoding(Job& job, int64_t next_step) {
    job.is_decoding = false;
    num_decoding--;
    int64_t tokens = job.base + next_step;
    kv_tokens -= tokens;
    job.generated += tokens - job.tokens;
    job.tokens = tokens;
    job.computed = job.trusted = tokens - 1;
    growing[job.first_growth % pages.size]--;
    job.num_blocks += num_grown(job, next_step);
    job.num_tokens = job.generated;
    job.num_gaps_over += num_slow - job.slow_before;
    if (next_step - 1 > job.joined_at) job.last_was_over = last_was_slow;
  }
  int64_t num_grown(const Job& job, int64_t next_step) const {
    return floor_div(next_step - 1 - job.first_growth, pages.size) + 1;
  }
  void finish(int id, double now_s) {
    recorder.finish(jobs[id], now_s);
    running.erase(id);
    pages.release(jobs[id]);
    view.num_open--;
    done.push_back(id);
  }

  // Who continues, who may start

  void grow() {
    int64_t phase = num_steps % pages.size;  // each needs a block every `size` steps
    if (growing[phase] <= pages.available()) return pages.take(growing[phase]);
    std::set<int> grown;
    std::vector<int> all(running.begin(), running.end());
    for (int id : all) {
      const Job& job = jobs[id];
      if (!job.is_decoding || job.first_growth % pages.size != phase) continue;
      while (job.is_decoding && !pages.available()) preempt(victim(), grown);
      if (!job.is_decoding) continue;
      pages.take(1);
      grown.insert(id);
    }
  }
  int victim() const {  // never the oldest; without shared blocks each of the others frees one
    int found = -1;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (auto at = std::next(running.begin()); at != running.end(); ++at) {
      const Job& job = jobs[*at];
      int64_t lost = job.is_decoding ? job.base + num_steps - 1 : job.computed;
      if (lost <= least) found = *at, least = lost;
    }
    return found;
  }
  void preempt(int id, const std::set<int>& grown) {
    Job& job = jobs[id];
    running.erase(id);
    view.num_preemptions++;
    if (job.is_decoding) {
      leave_decoding(job, num_steps);
      job.num_blocks += grown.count(id);
      job.last_s = last_end;
    } else {
      prefilling.erase(std::find(prefilling.begin(), prefilling.end(), id));
    }
    pages.release(job);
    job.computed = job.trusted = 0;
    job.queued_at = clocks;
    waiting.insert(std::lower_bound(waiting.begin(), waiting.end(), id), id);
  }
  void admit_by_arrival() {
    while (!waiting.empty() && (int64_t)running.size() < cap && admit(waiting.front())) {
    }
  }
  bool admit(int id) {
    Job& job = jobs[id];
    int64_t own = pages.own_match(job), total = blocks_for(job.tokens, pages.size);
    int64_t margin = running.empty() ? 0 : std::max<int64_t>(1, pages.num_total / 100);
    if (total + margin > pages.available()) return false;
    waiting.pop_front();
    pages.start(job, own, total);
    job.computed = job.trusted = own * pages.size;
    job.wait_cap_s += clocks.cap_s - job.queued_at.cap_s;
    job.wait_kv_s += clocks.kv_s - job.queued_at.kv_s;
    running.insert(id);
    prefilling.insert(std::lower_bound(prefilling.begin(), prefilling.end(), id), id);
    step.begun.push_back(id);
    return true;
  }
  void advance_clocks(double now_s) {
    double elapsed = now_s - clock_at;
    clock_at = now_s;
    if (blocked_by == CAP) clocks.cap_s += elapsed;
    if (blocked_by == KV) clocks.kv_s += elapsed;
  }

  const View* look() {
    view.running = recorder.running;
    view.waiting_cap = recorder.waiting_cap, view.waiting_kv = recorder.waiting_kv;
    view.num_ticks = recorder.ticks.size(), view.num_lengths = recorder.lengths.size();
    view.model = times.fit.model;
    return &view;
  }
};

}  // namespace

extern "C" {
Pod* pod_new(const Config* config, const Row* anchor, int64_t num_anchor, const Fit* fit) {
  return new Pod(*config, anchor, num_anchor, *fit);
}
void pod_delete(Pod* pod) { delete pod; }
void pod_send(Pod* pod, double t_s, int64_t prompt, int64_t max_tokens) {
  pod->arrivals.push_back({t_s, prompt, max_tokens});
}
void pod_factors(Pod* pod, const double* values, int64_t num) {
  pod->factors.insert(pod->factors.end(), values, values + num);
}
void pod_interference(Pod* pod, const double* values, int64_t num) {
  pod->interference.insert(pod->interference.end(), values, values + num);
}
int64_t pod_run(Pod* pod, double until_s) { return pod->run(until_s); }
void pod_patch(Pod* pod, int64_t cap, int64_t epoch, double now_s) {
  pod->patch(cap, epoch, now_s);
}
const View* pod_view(Pod* pod) { return pod->look(); }
// Closed ticks and the pairs of their sketches since the last call, to be read before the next
// `pod_run`; `pod_forget` lets go of them.
const Tick* pod_ticks(Pod* pod) { return pod->recorder.ticks.data(); }
const int64_t* pod_pairs(Pod* pod) { return pod->recorder.pairs.data(); }
const int64_t* pod_lengths(Pod* pod) { return pod->recorder.lengths.data(); }
void pod_forget(Pod* pod) {
  pod->recorder.ticks.clear();
  pod->recorder.pairs.clear();
  pod->recorder.lengths.clear();
}
// Pairs of the sketch of all gaps of closed ticks, into `pairs` of 2 * SIZE; how many there are.
int64_t pod_gaps(Pod* pod, Totals* totals, int64_t* pairs) {
  std::vector<int64_t> found;
  Sketch copy = pod->recorder.all_gaps;
  int64_t num = copy.move_to(found);
  std::copy(found.begin(), found.end(), pairs);
  *totals = pod->recorder.totals;
  return num;
}
// Those that ended, in that order, then those that are open; into `out` of as many.
void pod_jobs(Pod* pod, Ended* out) {
  std::vector<int> ids = pod->done;
  for (size_t id = 0; id < pod->jobs.size(); id++)
    if (!pod->jobs[id].has_ended) ids.push_back(id);
  for (int id : ids) {
    const Job& job = pod->jobs[id];
    *out++ = {job.t_s, job.first_s, job.last_s, job.num_tokens, job.num_gaps_over};
  }
}
int64_t pod_num_done(Pod* pod) { return pod->done.size(); }
int64_t pod_num_jobs(Pod* pod) { return pod->jobs.size(); }
}
