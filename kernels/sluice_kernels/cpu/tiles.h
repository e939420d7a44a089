// Products of bfloat16 by matrix units (AMX): the words of `matrix.h` are the tiles' own order.
#pragma once
#include "matrix.h"
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int TILE = 16;  // rows of a tile, and words of a row

// The tiles of a thread, for as long as it lives. 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns:
// 0, 1 and 4 have `upper` rows, 2, 3 and 5 `lower`.
struct Tiles {
  static bool usable() {
#ifdef __AMX_BF16__
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM
    return granted;
#else
    return false;
#endif
  }

  explicit Tiles(bool wanted) : used(wanted && usable()) {}
  ~Tiles() {
#ifdef __AMX_BF16__
    if (upper) _tile_release();
#endif
  }
  Tiles(const Tiles&) = delete;

  void shape(int new_upper, int new_lower) {
#ifdef __AMX_BF16__
    if (upper == new_upper && lower == new_lower) return;
    upper = new_upper, lower = new_lower;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const int of[8] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    for (int i = 0; i < 8; i++) config.rows[i] = of[i], config.bytes[i] = 4 * TILE;
    asm volatile("" ::: "memory");  // the intrinsics do not say what they read
    _tile_loadconfig(&config);
#endif
  }

  const bool used;
  int upper = 0, lower = 0;
};

// `product`; depth and columns are multiples of 16. Four tiles of c at a time, or what there is.
inline void tiled_product(Tiles& tiles, const uint32_t* a, int lda, const uint32_t* b, int ldb,
                          int depth, float* c, int ldc, int rows, int columns, bool add) {
#ifdef __AMX_BF16__
#define SLUICE_BEGIN(SUM, AT) \
  if (add)                    \
    _tile_loadd(SUM, AT, 4 * ldc); \
  else                        \
    _tile_zero(SUM)
  asm volatile("" ::: "memory");
  for (; rows > 0; rows -= 2 * TILE, a += 2 * TILE * lda, c += 2 * TILE * ldc) {
    const bool low = rows > TILE;
    tiles.shape(std::min(rows, TILE), low ? std::min(rows - TILE, TILE) : std::max(tiles.lower, 1));
    asm volatile("" ::: "memory");
    for (int j = 0; j < columns; j += 2 * TILE) {
      const bool right = j + TILE < columns;
      float *c0 = c + j, *c2 = c0 + TILE * ldc;
      SLUICE_BEGIN(0, c0);
      if (right) {
        SLUICE_BEGIN(1, c0 + TILE);
      }
      if (low) {
        SLUICE_BEGIN(2, c2);
      }
      if (low && right) {
        SLUICE_BEGIN(3, c2 + TILE);
      }
      for (int k = 0; k < depth; k += TILE) {
        _tile_loadd(4, a + k, 4 * lda);
        _tile_loadd(6, b + (size_t)k * ldb + j, 4 * ldb);
        _tile_dpbf16ps(0, 4, 6);
        if (right) {
          _tile_loadd(7, b + (size_t)k * ldb + j + TILE, 4 * ldb);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (low) {
          _tile_loadd(5, a + TILE * lda + k, 4 * lda);
          _tile_dpbf16ps(2, 5, 6);
        }
        if (low && right) _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c0, 4 * ldc);
      if (right) _tile_stored(1, c0 + TILE, 4 * ldc);
      if (low) _tile_stored(2, c2, 4 * ldc);
      if (low && right) _tile_stored(3, c2 + TILE, 4 * ldc);
    }
  }
#undef SLUICE_BEGIN
#else
  product<bf16>(a, lda, b, ldb, depth, c, ldc, rows, columns, add);
#endif
  asm volatile("" ::: "memory");
}

// c[16][16] = a[16][words] b[words][16] of words without gaps, between products of `rows`.
inline void keys_by_queries(Tiles& tiles, const uint32_t* a, int words, const uint32_t* b, float* c,
                            int rows) {
#ifdef __AMX_BF16__
  tiles.shape(rows, TILE);
  asm volatile("" ::: "memory");
  _tile_zero(2);
  for (int word = 0; word < words; word += TILE) {
    _tile_loadd(5, a + word, 4 * words);
    _tile_loadd(6, b + word * TILE, 4 * TILE);
    _tile_dpbf16ps(2, 5, 6);
  }
  _tile_stored(2, c, 4 * TILE);
  asm volatile("" ::: "memory");
#endif
}

constexpr int WIDE = 2 * TILE, TILES = TILE * WIDE;  // columns and words of two tiles side by side

// c[2][2] = a[rows][16 steps] b[steps][2] in tiles, of at most two above each other, added to what
// c holds if `add`. With each step `lines` lines from `next` on are fetched.
template <class T>
void tiled_block(Tiles& tiles, const uint32_t* a, int lda, const uint32_t* b, int steps, float* c,
                 int rows, bool add, const uint32_t* next, int lines) {
#ifdef __AMX_BF16__
#define SLUICE_MULTIPLY(SUM, LEFT, RIGHT) \
  if constexpr (PER_WORD<T> == 4)         \
    _tile_dpbusd(SUM, LEFT, RIGHT);       \
  else                                    \
    _tile_dpbf16ps(SUM, LEFT, RIGHT)
#define SLUICE_BEGIN(SUM)                              \
  if (add)                                             \
    _tile_loadd(SUM, c + SUM * TILE * TILE, 4 * TILE); \
  else                                                 \
    _tile_zero(SUM)
#define SLUICE_END(SUM) _tile_stored(SUM, c + SUM * TILE * TILE, 4 * TILE)
  const bool two = rows > TILE;
  tiles.shape(two ? TILE : rows, two ? rows - TILE : rows);
  asm volatile("" ::: "memory");
  SLUICE_BEGIN(0);
  SLUICE_BEGIN(1);
  if (two) {
    SLUICE_BEGIN(2);
    SLUICE_BEGIN(3);
  }
  for (int step = 0; step < steps; step++, a += TILE, b += TILES) {
    for (int line = 0; line < lines; line++, next += LINE) __builtin_prefetch(next, 0, 2);
    _tile_loadd(4, a, 4 * lda);
    _tile_loadd(6, b, 4 * TILE);
    SLUICE_MULTIPLY(0, 4, 6);
    _tile_loadd(7, b + TILE * TILE, 4 * TILE);
    SLUICE_MULTIPLY(1, 4, 7);
    if (two) {
      _tile_loadd(5, a + (size_t)TILE * lda, 4 * lda);
      SLUICE_MULTIPLY(2, 5, 6);
      SLUICE_MULTIPLY(3, 5, 7);
    }
  }
  SLUICE_END(0);
  SLUICE_END(1);
  if (two) {
    SLUICE_END(2);
    SLUICE_END(3);
  }
  asm volatile("" ::: "memory");
#endif
}

}  // namespace
