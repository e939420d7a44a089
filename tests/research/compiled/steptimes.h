// `sluice_core.steptime.StepTimes`, compiled. Sums are taken in another order than numpy's and
// the equations are solved by elimination, so that coefficients agree to about 1e-10, not bit for
// bit.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <vector>

struct StepModel {
  double a, b, c, d;
  int64_t n;
  double resid_q;
};

struct Fit {  // a step model and its stretch, and the constants of steptime.py and latency.py
  StepModel model;
  double stretch;
  double max_age_s, anchor_weight, model_quantile, tail_quantile, stretch_quantile, interference_shift,
      regime_s, normal_tail, max_step_ms;
  int64_t bucket_records, min_judged, least_chunk, interference_steps, known_steps, no_limit;
};

struct Row {
  double at_s, decodes, kv_tokens, prefill, ms, slowdown;
};

class StepTimes {
 public:
  Fit fit;

  StepTimes(const Row* profile, int64_t num, const Fit& constants) : fit(constants) {
    anchor_.assign(profile, profile + num);
    for (const Row& row : anchor_) known_ = std::max(known_, most(row.decodes));
    fit_recent();
  }

  void add(Row row) {
    row.slowdown = 1.0;
    int64_t shape = bits(row.decodes) << 16 | bits(row.kv_tokens) << 8 | bits(row.prefill);
    auto [ring, is_new] = rings_.try_emplace(shape, Ring{rows_.size(), 0});
    if (is_new) rows_.resize(rows_.size() + fit.bucket_records, Row{-INFINITY, 0, 0, 0, 1, 1});
    size_t place = ring->second.first + ring->second.num_added++ % fit.bucket_records;
    rows_[place] = row;
    compare(place, row);
  }

  bool is_slow() const { return slowdown_ > 1; }

  void refit(double now_s) {
    recent_.clear();
    for (const Row& row : rows_)
      if (row.at_s >= now_s - fit.max_age_s) recent_.push_back(row);
    if (recent_.empty()) return;
    is_fitted_ = (int64_t)recent_.size() >= fit.min_judged;
    known_ = known_of_recent();
    as_of_now(now_s);
    fit_recent();
  }

  int64_t chunk_limit(double itl_ms, int64_t decodes, int64_t kv_tokens) const {
    const StepModel& m = fit.model;
    double limit_ms = decodes ? std::min(itl_ms, fit.max_step_ms) : fit.max_step_ms;
    double room_ms = limit_ms - slowdown_ * predict_ms(m, decodes, kv_tokens, 0);
    room_ms -= tail_ms_within(room_ms);
    double per_token_ms = slowdown_ * (m.c + m.d * fit.stretch);
    return per_token_ms > 0 ? (int64_t)(room_ms / per_token_ms) : fit.no_limit;
  }

 private:
  struct Ring {
    size_t first;
    int64_t num_added;
  };
  using Vector = std::array<double, 4>;
  using Square = std::array<Vector, 4>;

  std::vector<Row> rows_, anchor_, recent_;
  std::map<int64_t, Ring> rings_;
  std::deque<std::pair<size_t, double>> newest_;  // a row, and its measured over predicted time
  std::vector<double> ratios_, taken_;
  std::vector<double> steps_ms_, chunks_ms_;  // `Tail`'s
  std::vector<double> sizes_;
  double slowdown_ = 1.0;
  struct Interference {
    bool is_on = false, is_regime = false;
    double since_s = 0, known = 0;
    StepModel before{};
  } interference_;
  bool is_fitted_ = false;
  double known_ = 0;

  // The decodes up to which recent steps are as many as make them known.
  double known_of_recent() {
    sizes_.clear();
    for (const Row& row : recent_) sizes_.push_back(most(row.decodes));
    const size_t place = std::min((size_t)fit.known_steps, sizes_.size()) - 1;
    std::nth_element(sizes_.begin(), sizes_.begin() + place, sizes_.end(), std::greater<>());
    return sizes_[place];
  }

  // Steps as they would be now: rid of interference; in one that lasts, those before it as slow.
  void as_of_now(double now_s) {
    const double since_s = interference_.since_s;
    bool is_old = interference_.is_on && now_s - since_s >= fit.regime_s;
    ratios_.clear();
    for (const Row& row : recent_)
      if (row.at_s >= since_s) ratios_.push_back(row.slowdown);
    const bool all_own = ratios_.size() == recent_.size();
    if (is_old && (int64_t)ratios_.size() >= fit.min_judged) interference_.is_regime = true;
    is_old = is_old && interference_.is_regime;
    const double shift = is_old ? quantile(ratios_, 0.5) : 1.0;
    for (Row& row : recent_)
      if (!is_old || row.at_s < since_s) row.ms = row.ms / std::max(row.slowdown, 1.0) * shift;
    if (!is_old || !all_own) return;
    interference_ = {};
    for (Row& row : rows_) row.slowdown = 1.0;
    newest_.clear();
  }

  static double predict_ms(const StepModel& m, double decodes, double kv_tokens, double prefill) {
    return m.a + m.b * decodes + m.c * kv_tokens + m.d * prefill;
  }

  void compare(size_t place, const Row& row) {
    const Interference& interference = interference_.is_on ? interference_ : Interference{true, false, row.at_s, known_, fit.model};
    const double predicted_ms =
        predict_ms(interference.before, row.decodes, row.kv_tokens, row.prefill);
    double ratio = row.ms / std::max(predicted_ms, 1e-6);
    const double larger = std::max(row.decodes / std::max(interference.known, 1.0), 1.0);
    if (interference.is_regime && ratio > 1 && ratio <= larger) return;  // this does not say if it lasts
    ratio = std::min(ratio, std::max(ratio / larger, 1.0));
    newest_.emplace_back(place, ratio);
    if (is_fitted_) rows_[place].slowdown = std::min(slowdown_, std::max(ratio, 1.0));
    if ((int64_t)newest_.size() > fit.interference_steps) newest_.pop_front();
    if ((int64_t)newest_.size() < fit.interference_steps) return;
    ratios_.clear();
    for (const auto& [_, ratio] : newest_) ratios_.push_back(ratio);
    std::sort(ratios_.begin(), ratios_.end());
    double median = ratios_[fit.interference_steps / 2];
    double shift = std::fabs(median - 1) > fit.interference_shift ? median : 1.0;
    if (is_fitted_) rows_[newest_[fit.interference_steps / 2].first].slowdown = shift;
    if (shift <= 1)
      interference_ = {};
    else if (!interference_.is_on && is_fitted_)
      interference_ = interference;
    slowdown_ = interference_.is_regime ? 1.0 : shift;
  }

  // The most decodes of as many bits.
  static double most(double decodes) { return (double)((int64_t{1} << bits(decodes)) - 1); }

  static int64_t bits(double value) {
    int64_t whole = (int64_t)value, num = 0;
    for (; whole; whole >>= 1) num++;
    return num;
  }

  void fit_recent() {
    Vector x = non_negative_fit();
    // A quantile of few is no quantile: until there are enough, the profile's count as well.
    size_t num_judged = recent_.size();
    recent_.insert(recent_.end(), anchor_.begin(), anchor_.end());
    if ((int64_t)num_judged < fit.min_judged) num_judged = recent_.size();
    fit.stretch = stretch(x, num_judged);
    ratios_.clear(), steps_ms_.clear(), chunks_ms_.clear();
    for (size_t i = 0; i < num_judged; i++) {
      const Row& row = recent_[i];
      double mean_ms = x[0] + x[1] * row.decodes + x[2] * row.kv_tokens + x[3] * row.prefill;
      double predicted = std::max(mean_ms, 1e-6) + (fit.stretch - 1) * x[3] * row.prefill;
      ratios_.push_back(row.ms / predicted);
      steps_ms_.push_back(row.ms - predicted);
      if (row.prefill >= fit.least_chunk) chunks_ms_.push_back(row.ms - predicted);
    }
    std::sort(steps_ms_.begin(), steps_ms_.end());
    std::sort(chunks_ms_.begin(), chunks_ms_.end());
    if ((int64_t)chunks_ms_.size() < fit.min_judged) chunks_ms_.clear();
    double resid_q = quantile(ratios_, fit.model_quantile);
    fit.model = {x[0], x[1], x[2], x[3], (int64_t)num_judged, resid_q};
  }

  double tail_ms_within(double room_ms) const {
    double tail_ms = 0;
    if (size_t num = num_within(steps_ms_, room_ms))
      tail_ms = std::max(tail_ms, quantile_of_first(steps_ms_, fit.tail_quantile, num));
    if (size_t num = num_within(chunks_ms_, room_ms)) {
      double median = quantile_of_first(chunks_ms_, 0.5, num);
      double high = quantile_of_first(chunks_ms_, 0.9, num);
      tail_ms = std::max(tail_ms, median + fit.normal_tail * (high - median));
    }
    return tail_ms;
  }

  static size_t num_within(const std::vector<double>& ascending, double most) {
    return std::upper_bound(ascending.begin(), ascending.end(), most) - ascending.begin();
  }

  // Of `num_judged` recent rows, or of the profile if these have few chunks; it has no launches.
  double stretch(const Vector& x, size_t num_judged) {
    if (x[3] <= 0) return 1.0;
    taken_of(x, recent_.data(), num_judged);
    const std::vector<double> judged = taken_;
    taken_of(x, anchor_.data(), anchor_.size());
    if ((int64_t)judged.size() >= fit.min_judged || taken_.empty()) taken_ = judged;
    return taken_.empty() ? 1.0 : std::max(1.0, quantile(taken_, fit.stretch_quantile));
  }

  // `taken_`: measured over mean times of the tokens of each chunk.
  void taken_of(const Vector& x, const Row* rows, size_t num) {
    taken_.clear();
    for (const Row* row = rows; row != rows + num; row++) {
      if (row->prefill < fit.least_chunk) continue;
      double rest_ms = row->ms - (x[0] + x[1] * row->decodes + x[2] * row->kv_tokens);
      taken_.push_back(rest_ms / (x[3] * row->prefill));
    }
  }

  static double quantile(std::vector<double>& values, double share) {
    std::sort(values.begin(), values.end());
    return quantile_of_first(values, share, values.size());
  }

  static double quantile_of_first(const std::vector<double>& ascending, double share, size_t num) {
    double place = share * (num - 1);
    size_t below = (size_t)place, above = std::min(below + 1, num - 1);
    double low = ascending[below], high = ascending[above];
    return low + (high - low) * (place - below);
  }

  Vector non_negative_fit() const {
    Square gram{};
    Vector target{}, scale;
    scale.fill(1.0);
    add_rows(recent_, 1.0, gram, target, scale);
    add_rows(anchor_, fit.anchor_weight, gram, target, scale);
    for (int i = 0; i < 4; i++) {
      target[i] /= scale[i];
      for (int j = 0; j < 4; j++) gram[i][j] = gram[std::min(i, j)][std::max(i, j)];
    }
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 4; j++) gram[i][j] /= scale[i] * scale[j];
    Vector best = solve_best(gram, target);
    for (int i = 0; i < 4; i++) best[i] /= scale[i];
    return best;
  }

  static void add_rows(const std::vector<Row>& rows, double weight, Square& gram, Vector& target,
                       Vector& scale) {
    double sums[4][4] = {}, firsts[4] = {}, largest[4] = {};  // of their own, so in registers
    for (const Row& row : rows) {
      const double inverse = 1.0 / row.ms;
      const double part[4] = {inverse, row.decodes * inverse, row.kv_tokens * inverse,
                              row.prefill * inverse};
      largest[1] = std::max(largest[1], row.decodes);
      largest[2] = std::max(largest[2], row.kv_tokens);
      largest[3] = std::max(largest[3], row.prefill);
      for (int i = 0; i < 4; i++) {
        firsts[i] += part[i];
        for (int j = i; j < 4; j++) sums[i][j] += part[i] * part[j];
      }
    }
    for (int i = 0; i < 4; i++) {
      target[i] += weight * firsts[i];
      scale[i] = std::max(scale[i], largest[i]);
      for (int j = i; j < 4; j++) gram[i][j] += weight * sums[i][j];
    }
  }

  // All columns where that is non-negative, else the best of the sets for which it is.
  static Vector solve_best(const Square& gram, const Vector& target) {
    Vector best{};
    double best_loss = INFINITY;
    if (solve(gram, target, 15, best)) return best;
    best.fill(0.0);
    for (unsigned size = 1; size <= 4; size++)
      for (unsigned set = 1; set < 16; set++) {
        Vector x;
        if ((unsigned)__builtin_popcount(set) != size || !solve(gram, target, set, x)) continue;
        double loss = 0;
        for (int i = 0; i < 4; i++) {
          loss -= 2 * target[i] * x[i];
          for (int j = 0; j < 4; j++) loss += x[i] * gram[i][j] * x[j];
        }
        if (loss < best_loss - 1e-12) best_loss = loss, best = x;
      }
    return best;
  }

  // Columns of `set`, by elimination with the largest pivot; false if one comes out negative.
  static bool solve(const Square& gram, const Vector& target, unsigned set, Vector& x) {
    int pick[4], n = 0;
    for (int i = 0; i < 4; i++)
      if (set >> i & 1) pick[n++] = i;
    double rows[4][5];
    for (int i = 0; i < n; i++) {
      for (int j = 0; j < n; j++) rows[i][j] = gram[pick[i]][pick[j]];
      rows[i][n] = target[pick[i]];
    }
    for (int k = 0; k < n; k++) {
      int pivot = k;
      for (int i = k + 1; i < n; i++)
        if (std::fabs(rows[i][k]) > std::fabs(rows[pivot][k])) pivot = i;
      std::swap_ranges(rows[k], rows[k] + 5, rows[pivot]);
      if (rows[k][k] == 0) return false;
      for (int i = k + 1; i < n; i++) {
        double part = rows[i][k] / rows[k][k];
        for (int j = k; j <= n; j++) rows[i][j] -= part * rows[k][j];
      }
    }
    x.fill(0.0);
    for (int k = n - 1; k >= 0; k--) {
      double value = rows[k][n];
      for (int j = k + 1; j < n; j++) value -= rows[k][j] * x[pick[j]];
      x[pick[k]] = value / rows[k][k];
      if (x[pick[k]] < 0) return false;
    }
    return true;
  }
};
