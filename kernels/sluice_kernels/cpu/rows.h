// What is done to rows one by one.
#pragma once
#include <algorithm>

#include "team.h"
#include "vector.h"

namespace {

template <class Do>
void for_rows(int num_threads, int64_t rows, int64_t width, const Do& one) {
  constexpr int64_t WORTH_THREADS = 1 << 18;  // elements, some 50 microseconds
  constexpr int PARTS = 8;  // for each thread, so that one that comes late leaves the most of them
  if (rows * width < Team::worth(WORTH_THREADS)) num_threads = 1;
  const int64_t parts = num_threads > 1 ? std::min<int64_t>(rows, PARTS * num_threads) : 1;
  Team::all().run(num_threads, parts, [&](int part, int) {
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++) one(row);
  });
}

// 128 + row / scale as a byte, scale the row's largest element / 127.
template <class T>
void to_bytes(int num_threads, const T* in, uint8_t* out, float* scales, int rows, int width) {
  for_rows(num_threads, rows, width, [&](int64_t row) {
    const T* from = in + row * width;
    F most = F{};
    for (int x = 0; x < width; x += V) {
      F v = get(from + x, width - x), size = v < 0 ? -v : v;
      most = (size > most) | (size != size) ? size : most;
    }
    float scale = most[0];
    for (int i = 1; i < V; i++) scale = most[i] > scale || most[i] != most[i] ? most[i] : scale;
    scales[row] = scale / 127.0f;
    float by = scale > 0 ? 127.0f / scale : 0.0f;
    for (int x = 0; x < width; x += V) {
      F v = get(from + x, width - x) * by + 12582912.0f;  // rounds, as in exp
      B bytes = __builtin_convertvector((W)v + 128, B);
      memcpy(out + row * width + x, &bytes, std::min(V, width - x));
    }
  });
}

}  // namespace
