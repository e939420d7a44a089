// Products with weights that were brought into panels when they were loaded: of SLOTS outputs each,
// side by side for every word of a row, so that they are read straight through. Matrix units have
// panels of tiles.
//
// A panel is met by all rows before the next one, which is fetched meanwhile: of few rows, to bring
// a panel from memory takes as long as its products.
#include <type_traits>

#include "exported.h"
#include "rows.h"
#include "tiles.h"

namespace {

constexpr int TASK_ROWS = 32 * ROW_BLOCK;
constexpr int PARTED_ROWS = 2 * TASK_ROWS;  // at once: in parts they take twice their room
constexpr int PART_WORDS = 1 << 18;  // a megabyte: half a second-level cache
constexpr int STEPS = 12;            // of tiles, 24 KiB of a panel: half a first-level cache
constexpr int64_t WORTH_THREADS = 1 << 20;  // some ten microseconds; reading counts as 8 rows

enum Gate { NONE, SILU, GELU };  // whether half a panel is a gate for the other half

// Rows of T give rows of O, `outputs` wide. Rows of bytes have a scale each and a weight's outputs
// another, and `shifts` is what their zero, which is no 0, adds to each output.
template <class T, class O>
struct Call {
  const void* rows;
  const uint32_t* panels;
  const float *bias, *row_scales, *scales, *shifts;
  O* out;
  int num_rows, outputs, words;
  Gate gate;
};

// What the sums of some of a panel's outputs are brought to values by: those at `at` of all that
// panels have, n of them.
template <class T, class O>
struct Columns {
  F shift{}, scale{}, bias{};

  Columns(const Call<T, O>& call, int at, int n) {
    if (call.bias) bias = get(call.bias + at, n);
    if constexpr (PER_WORD<T> == 4)
      shift = get(call.shifts + at, n), scale = get(call.scales + at, n);
  }

  F value(const float* sums, const float* row_scale) const {
    F v = load<F>(sums);
    if constexpr (PER_WORD<T> == 4)
      v = (__builtin_convertvector((I)v, F) - shift) * (*row_scale * scale);
    return v + bias;
  }
};

// Rows [first, first + count) of a panel, of the sums of its two halves, each row `stride` behind
// the one before.
template <class T, class O>
void finish(const Call<T, O>& call, const float* left, const float* right, int stride, int first,
            int count, int panel, int half) {
  const int begin = 2 * half * panel, base = call.gate ? half * panel : begin;
  const int width = call.outputs - base;
  O* out = call.out + (size_t)first * call.outputs + base;
  const float* row_scales = PER_WORD<T> == 4 ? call.row_scales + first : nullptr;
  for (int x = 0; x < std::min(half, width); x += V) {
    if (call.gate) {
      const Columns<T, O> gate(call, begin + x, V), up(call, begin + half + x, V);
      for (int r = 0; r < count; r++) {
        const F open = opened(gate.value(left + r * stride + x, row_scales + r), call.gate == GELU);
        const F value = open * up.value(right + r * stride + x, row_scales + r);
        put(out + (size_t)r * call.outputs + x, value, width - x);
      }
    } else {
      for (int at = x; at < std::min(2 * half, width); at += half) {
        const Columns<T, O> columns(call, begin + at, width - at);
        const float* sums = (at < half ? left : right) + x;
        for (int r = 0; r < count; r++)
          put(out + (size_t)r * call.outputs + at, columns.value(sums + r * stride, row_scales + r),
              width - at);
      }
    }
  }
}

// Rows [first, last), which begin at `rows`, by one panel, while `next`, if any, is fetched.
template <class T, class O>
void meet(const Call<T, O>& call, Rows rows, int panel, int first, int last, const uint32_t* next) {
  const uint32_t* weights = call.panels + (size_t)panel * call.words * SLOTS;
  const int64_t lines = next ? call.words * LINES : 0, all = (last - first) * SLOTS;
  int64_t met = 0, fetched = 0;  // of all sums, and of lines
  alignas(64) float found[ROW_BLOCK * SLOTS];
  while (first < last) {
    const int now = next_block(last - first);
    with_rows(now, [&](auto num) {
      constexpr int R = num.value, C = column_block(R);
      for (int x = 0; x < SLOTS; x += C * V) {
        met += R * C * V;
        const int64_t until = lines * met / all;
        block<T, R, C>(rows, weights + x, SLOTS, call.words, found + x, SLOTS, false,
                       next + fetched * LINE, until - fetched);
        fetched = until;
      }
    });
    finish(call, found, found + SLOTS / 2, SLOTS, first, now, panel, SLOTS / 2);
    rows.words += (size_t)now * rows.stride, first += now;
  }
}

template <class T, class O>
int panels(const Call<T, O>& call, int width) {
  if (call.gate) width /= 2;
  return (call.outputs + width - 1) / width;
}

// Rows [begin, end), which begin at `rows`, by all panels.
template <class T, class O>
void meet_all(int num_threads, const Call<T, O>& call, Rows rows, int begin, int end) {
  const int num_parts = (end - begin + TASK_ROWS - 1) / TASK_ROWS;
  Team::all().run(num_threads, panels(call, SLOTS) * num_parts, [&](int task, int next_task) {
    const int panel = task / num_parts, before = task % num_parts * TASK_ROWS;
    const int first = begin + before, last = std::min(first + TASK_ROWS, end);
    const Rows own{rows.words + (size_t)before * rows.stride, rows.stride};
    const int next_panel = next_task < 0 ? panel : next_task / num_parts;
    const uint32_t* next = nullptr;
    if (next_panel != panel) next = call.panels + (size_t)next_panel * call.words * SLOTS;
    meet(call, own, panel, first, last, next);
  });
}

template <class T, class O>
void by_vectors(int num_threads, const Call<T, O>& call) {
  static thread_local Words room;
  const int at_once = PARTS<T> == 1 ? call.num_rows : PARTED_ROWS;
  for (int begin = 0; begin < call.num_rows; begin += at_once) {
    const int end = std::min(begin + at_once, call.num_rows);
    const uint32_t* from = (const uint32_t*)call.rows + (size_t)begin * call.words;
    const Rows rows = parted<T>(from, call.words, end - begin, call.words, room);
    meet_all(num_threads, call, rows, begin, end);
  }
}

// Panels of two tiles side by side. Of each, parts that lie in the first cache level are met by all
// rows of a task, which lie in the second; the next panel is fetched meanwhile.
template <class T, class O>
void meet_by_tiles(const Call<T, O>& call, int panel, int begin, int end, const uint32_t* next) {
  const int steps = call.words / TILE, blocks = (end - begin + WIDE - 1) / WIDE;
  const int lines = next ? (TILES / LINE + blocks - 1) / blocks : 0;
  const uint32_t* weights = call.panels + (size_t)panel * call.words * WIDE;
  const uint32_t* next_end = next + (size_t)call.words * WIDE;
  static thread_local Floats sums;
  const int kept = steps > STEPS ? 2 * TILES : 0;  // of each block, till its other steps
  grow(sums, 2 * TILES + (size_t)blocks * kept);
  Tiles tiles(true);
  for (int step = 0; step < steps; step += STEPS) {
    const int now = std::min(STEPS, steps - step);
    float* found = sums.data();
    for (int first = begin; first < end; first += WIDE, found += kept) {
      const int rows = std::min(WIDE, end - first), fetched = next < next_end ? lines : 0;
      const uint32_t* a = (const uint32_t*)call.rows + (size_t)first * call.words + step * TILE;
      tiled_block<T>(tiles, a, call.words, weights + (size_t)step * TILES, now, found, rows,
                     step > 0, next, fetched);
      next += fetched * now * LINE;
      if (step + now < steps) continue;
      for (int row = 0; row < rows; row += TILE) {
        const float* left = found + row * WIDE;
        const int count = std::min(rows - row, TILE);
        finish(call, left, left + TILE * TILE, TILE, first + row, count, panel, TILE);
      }
    }
  }
}

template <class T, class O>
void by_tiles(int num_threads, const Call<T, O>& call) {
  const int num_panels = panels(call, WIDE);
  const int part_rows = WIDE * std::max(PART_WORDS / (WIDE * call.words), 1);
  const int num_parts = (call.num_rows + part_rows - 1) / part_rows;
  Team::all().run(num_threads, num_panels * num_parts, [&](int task, int next_task) {
    const int first = task / num_panels * part_rows;
    const uint32_t* next = nullptr;
    if (next_task >= 0)
      next = call.panels + (size_t)(next_task % num_panels) * call.words * WIDE;
    meet_by_tiles(call, task % num_panels, first, std::min(first + part_rows, call.num_rows), next);
  });
}

template <class T, class O>
void linear(int num_threads, const Call<T, O>& call) {
  const int64_t work = (int64_t)call.outputs * call.words * (8 + call.num_rows);
  if (work < Team::worth(WORTH_THREADS)) num_threads = 1;
  if (PER_WORD<T> > 1 && call.words % TILE == 0 && Tiles::usable())
    by_tiles(num_threads, call);
  else
    by_vectors(num_threads, call);
}

}  // namespace

extern "C" {

// Words that a row must be a multiple of to be multiplied by tiles, for which panels have the order
// of `by_tiles`; 0 where there are none.
int tile_words() { return Tiles::usable() ? TILE : 0; }

void linear(int is_bf16, int num_threads, const void* rows, const void* panels, const float* bias,
            void* out, int num_rows, int outputs, int words, int gate) {
  const uint32_t* weights = (const uint32_t*)panels;
  auto call = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    linear(num_threads, Call<T, T>{rows, weights, bias, nullptr, nullptr, nullptr, typed, num_rows,
                                   outputs, words, (Gate)gate});
  };
  is_bf16 ? call((bf16*)out) : call((float*)out);
}

// The same of rows that are brought to bytes first, by panels of bytes.
void linear_of_bytes(int is_bf16, int num_threads, const void* rows, const void* panels,
                     const float* bias, void* out, const float* scales, const float* shifts,
                     int num_rows, int outputs, int words, int gate) {
  static thread_local Words narrow;
  static thread_local Floats row_scales;
  grow(narrow, (size_t)num_rows * words);
  grow(row_scales, num_rows);
  auto call = [&](auto* typed) {
    using O = std::remove_pointer_t<decltype(typed)>;
    to_bytes(num_threads, (const O*)rows, (uint8_t*)narrow.data(), row_scales.data(), num_rows,
             4 * words);
    linear(num_threads,
           Call<int8, O>{narrow.data(), (const uint32_t*)panels, bias, row_scales.data(), scales,
                         shifts, typed, num_rows, outputs, words, (Gate)gate});
  };
  is_bf16 ? call((bf16*)out) : call((float*)out);
}
}
