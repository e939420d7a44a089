// Products of small matrices whose parts lie in the first cache levels.
#pragma once
#include <algorithm>
#include <new>
#include <vector>

#include "vector.h"

namespace {

constexpr int SLOTS = 64;
constexpr int LINE = 16, LINES = SLOTS / LINE;  // words of a cache line; lines of SLOTS words

template <class T>
struct Aligned {  // to a cache line, so that no vector lies in two
  using value_type = T;
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t{64}); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
  bool operator==(const Aligned&) const { return true; }
  bool operator!=(const Aligned&) const { return false; }
};
using Words = std::vector<uint32_t, Aligned<uint32_t>>;
using Floats = std::vector<float, Aligned<float>>;

// Room for so many elements; what was there is kept, and nothing set to zero again.
template <class Vector>
void grow(Vector& vector, size_t size) {
  if (vector.size() < size) vector.resize(size);
}

// Rows of words as columns: turned[words][columns], of which those behind the rows stay as they are.
inline void as_columns(const uint32_t* rows, int num_rows, int words, int columns,
                       uint32_t* turned) {
  for (int row = 0; row < num_rows; row++)
    for (int word = 0; word < words; word++)
      turned[(size_t)word * columns + row] = rows[(size_t)row * words + word];
}

int padded(int n) { return (n + V - 1) / V * V; }

// c[R][C * V] = a[R][depth] b[depth][C * V], added to what c holds if `add`. For each word of a row
// FETCHED lines from `next` on are fetched meanwhile.
template <class T, int R, int C, int FETCHED = 0>
inline void block(const uint32_t* a, int lda, const uint32_t* b, int ldb, int depth, float* c,
                  int ldc, bool add, const uint32_t* next = nullptr) {
  F sums[R][C];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < C; j++) sums[r][j] = add ? load<F>(c + r * ldc + j * V) : F{};
  for (int k = 0; k < depth; k++) {
    for (int line = 0; line < FETCHED; line++, next += LINE) __builtin_prefetch(next, 0, 2);
    W right[C];
    for (int j = 0; j < C; j++) right[j] = load<W>(b + (size_t)k * ldb + j * V);
    for (int r = 0; r < R; r++) {
      W left = W{} + a[r * lda + k];
      for (int j = 0; j < C; j++) sums[r][j] = multiply_add<T>(sums[r][j], left, right[j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < C; j++) put(c + r * ldc + j * V, sums[r][j]);
}

template <class T, int R>
void block_row(const uint32_t* a, int lda, const uint32_t* b, int ldb, int depth, float* c, int ldc,
               int columns, bool add) {
  int j = 0;
  for (; j + COLUMN_BLOCK * V <= columns; j += COLUMN_BLOCK * V)
    block<T, R, COLUMN_BLOCK>(a, lda, b + j, ldb, depth, c + j, ldc, add);
  for (; j < columns; j += V) block<T, R, 1>(a, lda, b + j, ldb, depth, c + j, ldc, add);
}

template <class T, int R = ROW_BLOCK>
void product(const uint32_t* a, int lda, const uint32_t* b, int ldb, int depth, float* c, int ldc,
             int rows, int columns, bool add) {
  for (; rows >= R; rows -= R, a += R * lda, c += R * ldc)
    block_row<T, R>(a, lda, b, ldb, depth, c, ldc, columns, add);
  if constexpr (R > 1)
    if (rows) product<T, R - 1>(a, lda, b, ldb, depth, c, ldc, rows, columns, add);
}

// Bring up to SLOTS rows of a matrix into the order that they are multiplied in, as columns; start
// to fetch those that come next. What lies in pages lies anywhere, and the processor foresees only
// what follows within one.
template <class T>
void order_rows(const T* const* slots, const T* const* next, int num_slots, int width,
                uint32_t* ordered) {
  int words = width / PER_WORD<T>;
  for (int s = 0; s < num_slots; s += V)
    for (int w = 0; w < words; w += V) {
      W rows[V];
      for (int i = 0; i < V; i++) {
        const uint32_t* from = (const uint32_t*)slots[std::min(s + i, num_slots - 1)] + w;
        rows[i] = w + V <= words ? load<W>(from) : (W)get((const float*)from, words - w);
        __builtin_prefetch((const uint32_t*)next[s + i] + w, 0, 2);
      }
      transpose(rows);
      for (int i = 0; i < V; i++)
        memcpy(ordered + (size_t)(w + i) * SLOTS + s, &rows[i], sizeof(W));
    }
}

}  // namespace
