// Logits by embeddings that are also looked up in: they stay in the order that they are read in, so
// that no second copy is held, and are brought into that of the product a block at a time.
#include "team.h"
#include "tiles.h"

namespace {

template <class T>
void run(int num_threads, const T* rows, const T* weight, float* out, int num_rows, int outputs,
         int width) {
  const int words = width / PER_WORD<T>;
  static thread_local Words room;
  const Rows left = parted<T>((const uint32_t*)rows, words, num_rows, words, room);
  Team::all().run(num_threads, (outputs + SLOTS - 1) / SLOTS, [&](int block, int) {
    const int base = block * SLOTS;
    static thread_local Words ordered;
    static thread_local Floats found;
    ordered.resize((size_t)padded(words) * SLOTS);
    found.resize((size_t)num_rows * SLOTS);
    const T *now[SLOTS], *next[SLOTS];
    const int count = std::min(SLOTS, outputs - base);
    for (int i = 0; i < SLOTS; i++) {
      now[i] = weight + (size_t)std::min(base + i, outputs - 1) * width;
      next[i] = weight + (size_t)std::min(base + SLOTS + i, outputs - 1) * width;
    }
    order_rows<T>(now, count, width, ordered.data(), [&](int s, int w) {
      for (int i = s; i < s + V; i++) __builtin_prefetch((const uint32_t*)next[i] + w, 0, 2);
    });
    product<T>(left, ordered.data(), SLOTS, words, found.data(), SLOTS, num_rows, padded(count),
               false);
    for (int row = 0; row < num_rows; row++)
      memcpy(out + (size_t)row * outputs + base, found.data() + row * SLOTS, 4 * count);
  });
}

// The same by tiles, which need no order of the weights: they are multiplied by the rows, as
// columns.
void run_by_tiles(int num_threads, const bf16* rows, const bf16* weight, float* out, int num_rows,
                  int outputs, int width) {
#ifdef __AMX_BF16__
  const int words = width / PER_WORD<bf16>, columns = padded(num_rows);
  Words turned((size_t)words * columns);
  as_columns((const uint32_t*)rows, num_rows, words, columns, turned.data());
  Team::all().run(num_threads, (outputs + SLOTS - 1) / SLOTS, [&](int block, int) {
    static thread_local Floats found;
    found.resize((size_t)SLOTS * columns);
    const int base = block * SLOTS, count = std::min(SLOTS, outputs - base);
    Tiles tiles(true);
    tiled_product(tiles, (const uint32_t*)weight + (size_t)base * words, words, turned.data(),
                  columns, words, found.data(), columns, count, columns, false);
    for (int i = 0; i < count; i += TILE)
      for (int row = 0; row < num_rows; row += TILE) {
        W part[TILE];
        for (int k = 0; k < TILE; k++)
          part[k] = load<W>(found.data() + (size_t)(i + k) * columns + row);
        transpose(part);
        for (int k = 0; k < std::min(TILE, num_rows - row); k++)
          put(out + (size_t)(row + k) * outputs + base + i, (F)part[k], count - i);
      }
  });
#endif
}

}  // namespace

extern "C" void shared_head(int is_bf16, int num_threads, const void* rows, const void* weight,
                            float* out, int num_rows, int outputs, int width) {
  if (!num_rows) return;  // a chunk that ends no prompt: the weights need not be read
  if (is_bf16 && width % (2 * TILE) == 0 && Tiles::usable())
    run_by_tiles(num_threads, (const bf16*)rows, (const bf16*)weight, out, num_rows, outputs,
                 width);
  else if (is_bf16)
    run(num_threads, (const bf16*)rows, (const bf16*)weight, out, num_rows, outputs, width);
  else
    run(num_threads, (const float*)rows, (const float*)weight, out, num_rows, outputs, width);
}
