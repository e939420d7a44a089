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

// A matrix of words as `block` takes it from the left: with the parts of each side by side. To part
// them here costs less than to do so for every block of columns.
struct Rows {
  const uint32_t* words;
  int stride;
};
template <class T>
inline Rows parted(const uint32_t* rows, int stride, int num_rows, int words, Words& room) {
  if constexpr (PARTS<T> == 1) return {rows, stride};
  grow(room, (size_t)num_rows * words * 2 + 2 * V);
  uint32_t* out = room.data();
  for (int r = 0; r < num_rows; r++, out += 2 * words)
    for (int k = 0; k < words; k += V) {
      const W word = (W)get((const float*)rows + (size_t)r * stride + k, words - k);
      const W first = part<T, 0, false>(word), second = part<T, 1, false>(word);
      constexpr I low = made<I>([](int i) { return i % 2 * V + i / 2; });
      constexpr I high = low + V / 2;
      const W both[2] = {__builtin_shuffle(first, second, low),
                         __builtin_shuffle(first, second, high)};
      memcpy(out + 2 * k, both, sizeof(both));
    }
  return {room.data(), 2 * words};
}

// sums[R][C * V] grow by parts PART and later of a word of R rows by those of b[C * V]. What there
// are fewer of is held meanwhile.
template <class T, int PART, int R, int C>
inline void multiply_parts(F (&sums)[R][C], const Rows& a, size_t k, const uint32_t* b) {
  auto left = [&](int r) { return W{} + a.words[r * a.stride + PARTS<T> * k + PART]; };
  auto right = [&](int j) { return part<T, PART>(load<W>(b + j * V)); };
  W held[std::min(R, C)];
  if constexpr (R < C) {
    for (int r = 0; r < R; r++) held[r] = left(r);
    for (int j = 0; j < C; j++) {
      const W now = right(j);
      for (int r = 0; r < R; r++) sums[r][j] = multiply_add<T>(sums[r][j], held[r], now);
    }
  } else {
    for (int j = 0; j < C; j++) held[j] = right(j);
    for (int r = 0; r < R; r++) {
      const W now = left(r);
      for (int j = 0; j < C; j++) sums[r][j] = multiply_add<T>(sums[r][j], now, held[j]);
    }
  }
  if constexpr (PART + 1 < PARTS<T>) multiply_parts<T, PART + 1>(sums, a, k, b);
}

// c[R][C * V] = a[R][depth] b[depth][C * V], added to what c holds if `add`. Meanwhile, and evenly,
// `lines` from `next` on are fetched.
template <class T, int R, int C>
[[gnu::noinline]] void block(const Rows& a, const uint32_t* b, int ldb, int depth, float* c,
                             int ldc, bool add, const uint32_t* next = nullptr, int lines = 0) {
  constexpr int64_t WHOLE = 1 << 16;
  const int64_t for_each = (lines * WHOLE + depth - 1) / depth;
  int64_t due = 0;
  F sums[R][C];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < C; j++) sums[r][j] = add ? load<F>(c + r * ldc + j * V) : F{};
  for (int k = 0; k < depth; k++) {
    for (due += for_each; due >= WHOLE; due -= WHOLE, next += LINE) __builtin_prefetch(next, 0, 2);
    multiply_parts<T, 0>(sums, a, k, b + (size_t)k * ldb);
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < C; j++) put(c + r * ldc + j * V, sums[r][j]);
}

template <class T, int R>
void block_row(const Rows& a, const uint32_t* b, int ldb, int depth, float* c, int ldc, int columns,
               bool add) {
  constexpr int C = column_block(R);
  int j = 0;
  for (; j + C * V <= columns; j += C * V)
    block<T, R, C>(a, b + j, ldb, depth, c + j, ldc, add);
  for (; j < columns; j += V) block<T, R, 1>(a, b + j, ldb, depth, c + j, ldc, add);
}

// Rows are met in blocks of equal size, one more or less: one of few rows has few sums, each of
// which waits for itself, and so takes nearly as long as one of many.
inline int next_block(int rows) {
  const int blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  return (rows + blocks - 1) / blocks;
}

// Calls of with std::integral_constant<int, R> for R == rows, of 1 .. ROW_BLOCK.
template <int R = ROW_BLOCK, class Do>
inline void with_rows(int rows, Do of) {
  if (rows == R)
    of(std::integral_constant<int, R>{});
  else if constexpr (R > 1)
    with_rows<R - 1>(rows, of);
}

template <class T>
void product(Rows a, const uint32_t* b, int ldb, int depth, float* c, int ldc, int rows,
             int columns, bool add) {
  while (rows > 0) {
    const int now = next_block(rows);
    with_rows(now, [&](auto num) {
      block_row<T, num.value>(a, b, ldb, depth, c, ldc, columns, add);
    });
    a.words += (size_t)now * a.stride, c += (size_t)now * ldc, rows -= now;
  }
}

template <class T>
void product(const uint32_t* a, int lda, const uint32_t* b, int ldb, int depth, float* c, int ldc,
             int rows, int columns, bool add) {
  static thread_local Words room;
  product<T>(parted<T>(a, lda, rows, depth, room), b, ldb, depth, c, ldc, rows, columns, add);
}

// Bring up to SLOTS rows of a matrix into the order that they are multiplied in, as columns. Before
// each block of V rows and words `at_block` is called with the first of both.
template <class T, class At>
void order_rows(const T* const* slots, int num_slots, int width, uint32_t* ordered,
                const At& at_block) {
  int words = width / PER_WORD<T>;
  for (int s = 0; s < num_slots; s += V)
    for (int w = 0; w < words; w += V) {
      W rows[V];
      at_block(s, w);
      for (int i = 0; i < V; i++) {
        const uint32_t* from = (const uint32_t*)slots[std::min(s + i, num_slots - 1)] + w;
        rows[i] = w + V <= words ? load<W>(from) : (W)get((const float*)from, words - w);
      }
      transpose(rows);
      for (int i = 0; i < V; i++)
        memcpy(ordered + (size_t)(w + i) * SLOTS + s, &rows[i], sizeof(W));
    }
}

}  // namespace
