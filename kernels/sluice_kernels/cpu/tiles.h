// Products of bfloat16 by matrix units (AMX): the words of `matrix.h` are the tiles' own order.
#pragma once
#include "matrix.h"
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int TILE = 16;  // rows of a tile, and words of a row

// Tiles of 16 rows for most of a product's rows and of `rows % 16` for the others, for as long as it
// lives: a thread has one configuration.
struct Tiles {
  static bool usable() {
#ifdef __AMX_BF16__
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM
    return granted;
#else
    return false;
#endif
  }

  Tiles(bool wanted, int rows) : used(wanted && usable()) {
#ifdef __AMX_BF16__
    if (!used) return;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const int rest = std::max(rows % TILE, 1);
    const int of[8] = {TILE, TILE, rest, rest, TILE, rest, TILE, TILE};
    for (int i = 0; i < 8; i++) config.rows[i] = of[i], config.bytes[i] = 4 * TILE;
    asm volatile("" ::: "memory");  // the intrinsics do not say what they read
    _tile_loadconfig(&config);
#endif
  }
  ~Tiles() {
#ifdef __AMX_BF16__
    if (used) _tile_release();
#endif
  }
  Tiles(const Tiles&) = delete;

  const bool used;
};

#ifdef __AMX_BF16__
// One row of tiles of c, two of them at a time: SUM and SUM + 1 by LEFT and tiles 6 and 7.
#define SLUICE_BEGIN_TILE(SUM, AT) \
  if (add)                         \
    _tile_loadd(SUM, AT, 4 * ldc); \
  else                             \
    _tile_zero(SUM)
#define SLUICE_ROW_OF_TILES(SUM, NEXT, LEFT)                    \
  for (int j = 0; j < columns; j += 2 * TILE) {                 \
    const bool both = j + TILE < columns;                       \
    SLUICE_BEGIN_TILE(SUM, c + j);                              \
    if (both) {                                                 \
      SLUICE_BEGIN_TILE(NEXT, c + j + TILE);                    \
    }                                                           \
    for (int k = 0; k < depth; k += TILE) {                     \
      _tile_loadd(LEFT, a + k, 4 * lda);                        \
      _tile_loadd(6, b + (size_t)k * ldb + j, 4 * ldb);         \
      _tile_dpbf16ps(SUM, LEFT, 6);                             \
      if (both) {                                               \
        _tile_loadd(7, b + (size_t)k * ldb + j + TILE, 4 * ldb); \
        _tile_dpbf16ps(NEXT, LEFT, 7);                          \
      }                                                         \
    }                                                           \
    _tile_stored(SUM, c + j, 4 * ldc);                          \
    if (both) _tile_stored(NEXT, c + j + TILE, 4 * ldc);        \
  }
#endif

// `product`, with `tiles` made for so many rows; depth and columns are multiples of 16.
inline void tiled_product(const Tiles&, const uint32_t* a, int lda, const uint32_t* b, int ldb,
                          int depth, float* c, int ldc, int rows, int columns, bool add) {
#ifdef __AMX_BF16__
  asm volatile("" ::: "memory");
  for (; rows >= TILE; rows -= TILE, a += TILE * lda, c += TILE * ldc) {
    SLUICE_ROW_OF_TILES(0, 1, 4)
  }
  if (rows > 0) {
    SLUICE_ROW_OF_TILES(2, 3, 5)
  }
#else
  product<bf16>(a, lda, b, ldb, depth, c, ldc, rows, columns, add);
#endif
}

}  // namespace
