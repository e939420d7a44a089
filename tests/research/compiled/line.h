// The worker's ordering.py, compiled, for jobs of one priority whose deadlines come in their order
// of arrival: so both parts of the line are kept by id.
#pragma once
#include <queue>

#include "recording.h"

struct Pace {
  double price_s, place_s;
  int64_t num_free;
};

class Line {
 public:
  Line(const Config& c, std::vector<Job>& j) : config_(c), jobs_(j) {}

  bool holds(int id) const { return !jobs_[id].generated; }
  void add(int id) {
    there_.push_back(id);
    if (std::isfinite(config_.due_ms))
      in_time_.push_back(id);
    else
      add_late(id);
  }
  void remove(int id) {  // it has its first token
    there_.erase(std::lower_bound(there_.begin(), there_.end(), id));
    jobs_[id].is_late = false;
    num_left_++;
  }

  // Calls `serve` with each as one step serves them, until it says no.
  template <typename Serve>
  void ordered(double now_s, const Pace& pace, Serve serve) {
    arrange(now_s, pace);
    const int owed = whose_turn();
    if (owed >= 0 && !serve(owed)) return;
    for (const std::vector<int>* part : {&in_time_, &late_})
      for (int id : *part)
        if (id != owed && holds(id) && !serve(id)) return;
  }

 private:
  const Config& config_;
  std::vector<Job>& jobs_;
  std::vector<int> there_, in_time_, late_;  // the latter two also hold some that have left
  int64_t num_steps_left_ = 0, num_left_ = 0;

  double due_s(int id) const { return jobs_[id].t_s + config_.due_ms / 1e3; }
  double work(int id) const { return (double)(jobs_[id].tokens - jobs_[id].computed); }

  void note_late(int id) {
    jobs_[id].is_late = true;
    if (jobs_[id].late_since < 0) jobs_[id].late_since = num_left_;
  }
  void add_late(int id) {
    late_.insert(std::upper_bound(late_.begin(), late_.end(), id), id);
    note_late(id);
  }
  int whose_turn() const {
    const int64_t enough = config_.patience * (int64_t)there_.size();
    for (int id : late_)
      if (holds(id)) return num_left_ - jobs_[id].late_since >= enough ? id : -1;
    return -1;
  }

  void arrange(double now_s, const Pace& pace) {
    if (num_steps_left_) {
      num_steps_left_--;
      pass_by_the_late(now_s, pace.price_s);
      return;
    }
    moore_hodgson(now_s, pace);
    in_time_.clear(), late_.clear();
    for (int id : there_) {
      if (jobs_[id].is_late)
        late_.push_back(id), note_late(id);
      else
        in_time_.push_back(id);
    }
    num_steps_left_ = (int64_t)there_.size() / config_.arranged_a_step;
  }
  void moore_hodgson(double now_s, const Pace& pace) {
    std::priority_queue<std::pair<double, int>> kept;  // of equal work the newest gives way
    double ends_s = now_s, place_s = now_s - pace.place_s * pace.num_free;
    for (int id : there_) {
      jobs_[id].is_late = std::isinf(config_.due_ms);
      if (jobs_[id].is_late) continue;
      kept.emplace(work(id), id);
      ends_s += work(id) * pace.price_s;
      place_s += pace.place_s;
      if (std::max(ends_s, place_s) <= due_s(id)) continue;
      const auto [most, late] = kept.top();
      kept.pop();
      ends_s -= most * pace.price_s;
      place_s -= pace.place_s;
      jobs_[late].is_late = true;
    }
  }
  void pass_by_the_late(double now_s, double price_s) {
    size_t num_passed = 0;
    for (; num_passed < in_time_.size(); num_passed++) {
      const int id = in_time_[num_passed];
      if (!holds(id)) continue;
      if (now_s + work(id) * price_s <= due_s(id)) break;
      add_late(id);
    }
    in_time_.erase(in_time_.begin(), in_time_.begin() + num_passed);
  }
};
