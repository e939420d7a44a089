// Products with weights that were brought into panels when they were loaded: of SLOTS outputs each,
// side by side for every word of a row, so that they are read straight through.
//
// A panel is met by all rows before the next one. Of few rows, where bringing a panel from memory
// takes as long as its products, the next one is fetched meanwhile.
#include <type_traits>

#include "matrix.h"

namespace {

constexpr int FEW_ROWS = 96;
constexpr int TASK_ROWS = 32 * ROW_BLOCK;
constexpr int64_t WORTH_THREADS = 1 << 20;  // some ten microseconds; reading counts as 8 rows

// Rows of T give rows of O. Rows of bytes have a scale each and a weight's outputs another, and
// `shifts` is what their zero, which is no 0, adds to each output.
template <class T, class O>
struct Call {
  const void* rows;
  const uint32_t* panels;
  const float *bias, *row_scales, *scales, *shifts;
  O* out;
  int num_rows, outputs, words;
};

template <class T, class O>
void finish(const Call<T, O>& call, const float* found, int first, int count, int base) {
  const int width = std::min(SLOTS, call.outputs - base);
  for (int row = first; row < first + count; row++, found += SLOTS)
    for (int x = 0; x < width; x += V) {
      const int n = width - x;
      F v = load<F>(found + x);
      if constexpr (PER_WORD<T> == 4) {
        v = __builtin_convertvector((I)v, F) - get(call.shifts + base + x, n);
        v *= call.row_scales[row] * get(call.scales + base + x, n);
      }
      if (call.bias) v += get(call.bias + base + x, n);
      put(call.out + (size_t)row * call.outputs + base + x, v, n);
    }
}

// Rows [first, last) by one panel; FETCHED lines of the next one for each word of a block of rows.
template <int FETCHED, int R = ROW_BLOCK, class T, class O>
void meet(const Call<T, O>& call, int panel, int first, int last, const uint32_t* next) {
  constexpr int WIDE = COLUMN_BLOCK * V, FETCHED_NOW = FETCHED * WIDE / SLOTS;
  const uint32_t* weights = call.panels + (size_t)panel * call.words * SLOTS;
  const uint32_t* end = weights + 2 * (size_t)call.words * SLOTS;
  alignas(64) float found[R * SLOTS];
  for (; first + R <= last; first += R) {
    const uint32_t* rows = (const uint32_t*)call.rows + (size_t)first * call.words;
    for (int x = 0; x < SLOTS; x += WIDE)
      if (next && next < end) {
        block<T, R, COLUMN_BLOCK, FETCHED_NOW>(rows, call.words, weights + x, SLOTS, call.words,
                                               found + x, SLOTS, false, next);
        next += (size_t)FETCHED_NOW * LINE * call.words;
      } else {
        block<T, R, COLUMN_BLOCK>(rows, call.words, weights + x, SLOTS, call.words, found + x,
                                  SLOTS, false);
      }
    finish(call, found, first, R, panel * SLOTS);
  }
  if constexpr (R > 1)
    if (first < last) meet<FETCHED, R - 1>(call, panel, first, last, next);
}

template <class T, class O>
void linear(int num_threads, const Call<T, O>& call) {
  const int num_panels = (call.outputs + SLOTS - 1) / SLOTS;
  const int num_parts = (call.num_rows + TASK_ROWS - 1) / TASK_ROWS;
  const bool is_few = call.num_rows <= FEW_ROWS;
  if ((int64_t)call.outputs * call.words * (8 + call.num_rows) < WORTH_THREADS) num_threads = 1;
  // Panels in a row, so that the next one is this thread's; or one by one, for whoever is free.
  const int together = is_few ? (num_panels + num_threads - 1) / num_threads : 1;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(dynamic, together)
  for (int task = 0; task < num_panels * num_parts; task++) {
    const int panel = task / num_parts, first = task % num_parts * TASK_ROWS;
    const int last = std::min(first + TASK_ROWS, call.num_rows);
    const uint32_t* next = nullptr;
    if (is_few && panel + 1 < num_panels)
      next = call.panels + (size_t)(panel + 1) * call.words * SLOTS;
    if (call.num_rows <= ROW_BLOCK)
      meet<LINES>(call, panel, first, last, next);
    else if (call.num_rows <= 2 * ROW_BLOCK)
      meet<LINES / 2>(call, panel, first, last, next);
    else
      meet<LINES / 4>(call, panel, first, last, next);
  }
}

}  // namespace

extern "C" {

void linear(int is_bf16, int num_threads, const void* rows, const void* panels, const float* bias,
            void* out, int num_rows, int outputs, int words) {
  const uint32_t* weights = (const uint32_t*)panels;
  auto call = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    linear(num_threads, Call<T, T>{rows, weights, bias, nullptr, nullptr, nullptr, typed, num_rows,
                                   outputs, words});
  };
  is_bf16 ? call((bf16*)out) : call((float*)out);
}

void linear_of_bytes(int is_bf16, int num_threads, const void* rows, const void* panels,
                     const float* bias, void* out, const float* row_scales, const float* scales,
                     const float* shifts, int num_rows, int outputs, int words) {
  const uint32_t* weights = (const uint32_t*)panels;
  auto call = [&](auto* typed) {
    using O = std::remove_pointer_t<decltype(typed)>;
    linear(num_threads, Call<int8, O>{rows, weights, bias, row_scales, scales, shifts, typed,
                                      num_rows, outputs, words});
  };
  is_bf16 ? call((bf16*)out) : call((float*)out);
}
}
