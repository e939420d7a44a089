// Attention over paged keys and values, the same for chunks of prompts and for single new tokens; and
// over texts that lie behind each other, whose keys and values are in their own rows.
//
// Queries and the heads that share a key/value head are the rows of a tile. The slots that they see
// are brought into order SLOTS at a time (keys transposed, values paired: in the first cache level)
// and met by all rows; the softmax is computed as it goes (arXiv 2205.14135). Pages are read where
// they lie. Where there are fewer tiles than threads, a tile's slots are split between several.
#include <algorithm>
#include <vector>

#include "exported.h"
#include "team.h"
#include "tiles.h"

namespace {

constexpr int MAX_ROWS = 64;
constexpr int MIN_PART = 4 * SLOTS;
constexpr int64_t WORTH_THREADS = 1 << 20;  // multiplications, a tenth of a millisecond
constexpr float NOTHING = -1e37f, SOMETHING = -1e30f;  // scores unseen, and the least of others
constexpr float COARSE = 1e9f;  // from here on rounding is off by up to 32, and more

struct Call {
  const void *query, *cache;
  void* out;
  const int64_t *tables, *starts, *offsets;
  int num_seqs, num_pages, query_stride, num_heads, num_kv_heads, head_dim, block_size, window;
  float scale, softcap;
  bool in_rows = false, both_sides = false;

  int start(int seq) const { return in_rows ? 0 : starts[seq]; }
  int total(int seq) const { return offsets[seq + 1] - offsets[seq]; }
  // From a slot's keys to those of the next head.
  size_t head_size() const { return in_rows ? head_dim : (size_t)block_size * head_dim; }
  // Slots [first_seen, last_seen) are seen from a place; a window is on each side, or ends there.
  int first_seen(int place) const {
    return window ? std::max(place - window + !both_sides, 0) : 0;
  }
  int last_seen(int seq, int place) const {
    if (!both_sides) return place + 1;
    return window ? std::min(place + window + 1, total(seq)) : total(seq);
  }
};

// Queries [first, first + count) of a sequence, key/value heads [head, head + num_heads), slots
// [begin, end).
struct Item {
  int seq, first, count, head, num_heads, begin, end, part, num_parts;
};

struct State {  // of each row: the softmax's maximum and sum, and the weighted values
  Floats top, sum, out;
  void reset(int rows, int width) {
    top.assign(rows, NOTHING);
    sum.assign(rows, 0.0f);
    out.assign((size_t)rows * width, 0.0f);
  }
};

struct Scratch {
  Words query, turned, keys, values, weights;
  Floats scores;
  State state;
};

// Where the keys of each slot in [begin, end) begin; values lie a page of all heads behind.
template <class T>
void find(const Call& call, const Item& item, int begin, int end, const T** slots) {
  if (call.in_rows) {
    const size_t row = call.offsets[item.seq] + begin, stride = call.query_stride;
    const T* keys = (const T*)call.cache + row * stride + (size_t)item.head * call.head_dim;
    for (int at = begin; at < end; at++, keys += stride) *slots++ = keys;
    return;
  }
  const int64_t* table = call.tables + (size_t)item.seq * call.num_pages;
  for (int at = begin; at < end;) {
    int page = at / call.block_size, slot = at % call.block_size;
    size_t row = (table[page] * 2 * call.num_kv_heads + item.head) * call.block_size + slot;
    const T* keys = (const T*)call.cache + row * call.head_dim;
    for (; slot < call.block_size && at < end; slot++, at++, keys += call.head_dim) *slots++ = keys;
  }
}

void fetch(const void* from, size_t bytes) {
  for (size_t x = 0; x < bytes; x += 64) __builtin_prefetch((const char*)from + x, 0, 2);
}

// `at_slot` is called with each slot, or the first of two.
template <class At>
void order_values(const float* const* slots, size_t ahead, int num_slots, int head_dim,
                  uint32_t* values, const At& at_slot) {
  for (int s = 0; s < num_slots; s++) {
    at_slot(s);
    memcpy(values + (size_t)s * padded(head_dim), slots[s] + ahead, 4 * head_dim);
  }
}

typedef uint16_t Hs __attribute__((vector_size(4 * V)));
template <int... i>
constexpr Hs alternate(int first, std::integer_sequence<int, i...>) {
  return Hs{(uint16_t)(first + i / 2 + i % 2 * 2 * V)...};
}
constexpr Hs FIRST = alternate(0, std::make_integer_sequence<int, 2 * V>{});
constexpr Hs SECOND = alternate(V, std::make_integer_sequence<int, 2 * V>{});

template <class At>
void order_values(const bf16* const* slots, size_t ahead, int num_slots, int head_dim,
                  uint32_t* values, const At& at_slot) {
  for (int s = 0; s < num_slots; s += 2, values += padded(head_dim)) {
    at_slot(s);
    const bf16* even = slots[s] + ahead;
    const bf16* odd = s + 1 < num_slots ? slots[s + 1] + ahead : nullptr;
    int x = 0;
    for (; x + 2 * V <= head_dim; x += 2 * V) {
      const Hs a = load<Hs>(even + x), b = odd ? load<Hs>(odd + x) : Hs{};
      const Hs low = __builtin_shuffle(a, b, FIRST), high = __builtin_shuffle(a, b, SECOND);
      memcpy(values + x, &low, sizeof(low));
      memcpy(values + x + V, &high, sizeof(high));
    }
    for (; x < head_dim; x += V) {
      W pairs = (W)get(even + x, head_dim - x) >> 16;
      if (odd) pairs |= (W)get(odd + x, head_dim - x);
      memcpy(values + x, &pairs, sizeof(pairs));
    }
  }
}

// One row of scores to weights, in the slots [begin, end) that it sees; returns what the row's
// earlier sums must be multiplied by. Scores become powers of 2.
template <class T>
float soften(const Call& call, float* scores, int num_slots, int begin, int end, float* top,
             float* sum, T* weights) {
  constexpr float LOG2_E = 1.44269504f;
  const bool all = begin <= 0 && end >= padded(num_slots);
  float scale = call.softcap > 0 ? 1.0f : call.scale * LOG2_E;
  if (call.softcap > 0 || !all)
    for (int s = 0; s < num_slots; s += V) {
      F x = load<F>(scores + s);
      if (call.softcap > 0)
        x = LOG2_E * call.softcap * tanh(x * (call.scale / call.softcap));
      const I at = LANES + s;
      put(scores + s, (at >= begin) & (at < end) ? x : F{} + NOTHING);
    }
  F most = load<F>(scores);
  for (int s = V; s < num_slots; s += V) most = greater(load<F>(scores + s), most);
  const float highest = largest(most) * scale;
  if (highest < SOMETHING) {
    for (int s = 0; s < num_slots; s += V) {  // what is no number is seen, and stays that
      const F x = load<F>(scores + s);
      put(weights + s, x == x ? F{} : x);
    }
    return 1.0f;
  }
  if (std::abs(highest) > COARSE) {
    // Below, multiply and add are one instruction: a product that is not rounded, unlike `top`, of
    // which it is a power of 2. Here that power would be infinite, or the bits of anything.
    for (int s = 0; s < num_slots; s += V) put(scores + s, load<F>(scores + s) * scale);
    scale = 1.0f;
  }
  float kept = 1.0f;
  if (highest > *top) kept = exp2(F{} + (*top - highest))[0], *top = highest;
  const F under = F{} - *top;
  F total = F{};
  for (int s = 0; s < num_slots; s += V) {
    const F weight = exp2(load<F>(scores + s) * scale + under);
    total += weight;
    put(weights + s, weight);
  }
  *sum = *sum * kept + ::sum(total);
  return kept;
}

template <class T>
void multiply(Tiles& tiles, const uint32_t* a, int lda, const uint32_t* b, int ldb, int depth,
              float* c, int ldc, int rows, int columns, bool add) {
  if (tiles.used)
    tiled_product(tiles, a, lda, b, ldb, depth, c, ldc, rows, columns, add);
  else
    product<T>(a, lda, b, ldb, depth, c, ldc, rows, columns, add);
}

// The next slots' keys and values, fetched along what is done meanwhile: in a burst they would fill
// what the processor has for lines on their way, and all would wait. What lies in pages lies
// anywhere, and the processor foresees only what follows within one.
template <class T>
struct Fetched {
  const T* const* slots;
  const size_t ahead;  // of values before keys
  const int bytes;     // of a slot's keys or values
  int done = 0;

  // How far it is with the keys in order, the values, and the scores made weights.
  static constexpr int KEYS = 96, VALUES = 160, WHOLE = 4 * SLOTS;

  void to(int part) {  // of WHOLE
    for (; done < part / 4; done++) {
      fetch(slots[done], bytes);
      fetch(slots[done] + ahead, bytes);
    }
  }
};

// Scores of at most a tile of rows: keys are multiplied as they lie, which costs less than to order
// them for so few. `turned`: the queries as columns.
template <class T>
void score_few(Tiles& tiles, const T* const* slots, int num_slots, int words,
               const uint32_t* turned, uint32_t* keys, float* scores, int rows,
               Fetched<T>& fetched) {
#ifdef __AMX_BF16__
  constexpr int EACH = Fetched<T>::KEYS / (SLOTS / TILE);
  for (int s = 0; s < num_slots; s += TILE) {
    const T* from = slots[s];
    const int count = std::min(TILE, num_slots - s);
    bool apart = count < TILE;
    for (int i = 1; i < count; i++) apart |= slots[s + i] - from != i * PER_WORD<T> * words;
    if (apart) {
      for (int i = 0; i < count; i++) memcpy(keys + i * words, slots[s + i], 4 * words);
      from = (const T*)keys;
    }
    W found[TILE];
    const int part = s / TILE * EACH;
    fetched.to(part + EACH / 3);
    keys_by_queries(tiles, (const uint32_t*)from, words, turned, (float*)found, rows);
    fetched.to(part + 2 * EACH / 3);
    transpose(found);
    for (int row = 0; row < rows; row++) memcpy(scores + row * SLOTS + s, &found[row], sizeof(W));
    fetched.to(part + EACH);
  }
#endif
}

// Whole tiles of weights and values: zeros behind the last slot. Returns their words.
int fill_up(Scratch& scratch, int rows, int num_slots, int depth, int width) {
  const int whole = (depth + TILE - 1) / TILE * TILE, from = padded(num_slots);
  if (from < 2 * whole)
    for (int row = 0; row < rows; row++)
      memset((bf16*)scratch.weights.data() + row * SLOTS + from, 0,
             sizeof(bf16) * (2 * whole - from));
  memset(scratch.values.data() + (size_t)depth * width, 0,
         sizeof(uint32_t) * (whole - depth) * width);
  return whole;
}

// An item at work. Each head has `whole` rows of query and state, of which `rows` are its own.
template <class T>
struct Work {
  const Call& call;
  const Item& item;
  Scratch& scratch;
  const int group = call.num_heads / call.num_kv_heads, rows = item.count * group;
  const int words = call.head_dim / PER_WORD<T>, width = padded(call.head_dim);
  const size_t head_size = call.head_size();
  Tiles tiles{sizeof(T) == 2 && words % TILE == 0};
  const bool few = tiles.used && rows <= TILE;
  const int whole = tiles.used && !few ? (rows + TILE - 1) / TILE * TILE : rows;

  Work(const Call& call, const Item& item, Scratch& scratch)
      : call(call), item(item), scratch(scratch) {
    scratch.query.resize((size_t)item.num_heads * whole * words);
    scratch.keys.resize((size_t)padded(words) * SLOTS);
    scratch.values.resize((size_t)SLOTS * width);
    scratch.scores.resize((size_t)whole * SLOTS);
    scratch.weights.resize((size_t)whole * SLOTS);
    scratch.state.reset(item.num_heads * whole, width);
    const int taken = group * call.head_dim;
    for (int head = 0; head < item.num_heads; head++)
      for (int q = 0; q < item.count; q++) {
        const size_t token = call.offsets[item.seq] + item.first + q;
        const T* from = (const T*)call.query + token * call.query_stride;
        memcpy(query(head) + (size_t)q * group * words, from + (item.head + head) * taken,
               sizeof(T) * taken);
      }
    if (few) turn_queries();
  }

  uint32_t* query(int head) { return scratch.query.data() + (size_t)head * whole * words; }

  void turn_queries() {
    const int each = words * TILE;
    scratch.turned.assign((size_t)item.num_heads * each, 0);
    for (int head = 0; head < item.num_heads; head++)
      as_columns(query(head), rows, words, TILE, scratch.turned.data() + (size_t)head * each);
  }

  // A head and the slots from `base` on, while those of `next` are fetched.
  void meet(int head, int base, int num_slots, const T* const* slots, const T* const* next) {
    const size_t ahead = call.num_kv_heads * head_size;
    const int first_row = head * whole;
    Fetched<T> fetched{next, ahead, (int)sizeof(T) * call.head_dim};
    float* scores = scratch.scores.data();
    uint32_t* values = scratch.values.data();
    if (few) {
      score_few(tiles, slots, num_slots, words, scratch.turned.data() + head * words * TILE,
                scratch.keys.data(), scores, rows, fetched);
    } else {
      const int whole_words = padded(words), all = padded(num_slots) / V * whole_words;
      order_rows<T>(slots, num_slots, call.head_dim, scratch.keys.data(), [&](int s, int w) {
        fetched.to(fetched.KEYS * (s / V * whole_words + w) / all);
      });
      multiply<T>(tiles, query(head), words, scratch.keys.data(), SLOTS, words, scores, SLOTS,
                  whole, padded(num_slots), false);
    }
    order_values(slots, ahead, num_slots, call.head_dim, values, [&](int s) {
      fetched.to(fetched.KEYS + (fetched.VALUES - fetched.KEYS) * s / SLOTS);
    });
    for (int row = 0; row < rows; row++) {
      fetched.to(fetched.VALUES + (fetched.WHOLE - fetched.VALUES) * row / rows);
      soften_row(first_row, row, base, num_slots);
    }
    fetched.to(fetched.WHOLE);
    int depth = (num_slots + PER_WORD<T> - 1) / PER_WORD<T>;
    if (tiles.used) depth = fill_up(scratch, rows, num_slots, depth, width);
    multiply<T>(tiles, scratch.weights.data(), SLOTS / PER_WORD<T>, values, width, depth,
                scratch.state.out.data() + (size_t)first_row * width, width, whole, width, true);
  }

  void soften_row(int first_row, int row, int base, int num_slots) {
    State& state = scratch.state;
    const int at = first_row + row, place = call.start(item.seq) + item.first + row / group;
    const int begin = call.first_seen(place), end = call.last_seen(item.seq, place);
    const float kept = soften<T>(call, scratch.scores.data() + row * SLOTS, num_slots, begin - base,
                                 std::min(end, item.end) - base, &state.top[at], &state.sum[at],
                                 (T*)scratch.weights.data() + row * SLOTS);
    if (kept == 1.0f) return;
    float* out = state.out.data() + (size_t)at * width;
    for (int x = 0; x < width; x++) out[x] *= kept;
  }
};

// The slots from `base` on; returns how many.
template <class T>
int find_from(const Call& call, const Item& item, int base, const T** slots) {
  const int end = std::min(base + SLOTS, item.end);
  find(call, item, base, end, slots);
  return end - base;
}

// `following`: what is likely to be next, of which the first slots are fetched; null for nothing.
template <class T>
void attend(const Call& call, const Item& item, const Item* following, Scratch& scratch) {
  Work<T> work(call, item, scratch);
  const T *slots[SLOTS], *next[SLOTS] = {};
  int num_next = find_from(call, item, item.begin, next);
  std::fill(next + num_next, next + SLOTS, next[0]);  // what is fetched without need is there
  for (int base = item.begin; base < item.end; base += SLOTS) {
    const int num_slots = num_next;
    std::copy(next, next + SLOTS, slots);
    if (base + num_slots < item.end)
      num_next = find_from(call, item, base + num_slots, next);
    else if (following)
      find_from(call, *following, following->begin, next);
    for (int head = 0; head < item.num_heads; head++) {
      const T* after[SLOTS];  // the next head's slots lie behind these
      for (int i = 0; i < SLOTS; i++) after[i] = slots[i] + work.head_size;
      const bool last = head + 1 == item.num_heads;
      work.meet(head, base, num_slots, slots, last ? next : after);
      std::copy(after, after + SLOTS, slots);
    }
  }
}

template <class T>
void write(const Call& call, const Item& item, const State& state) {
  const int group = call.num_heads / call.num_kv_heads, width = padded(call.head_dim);
  const int whole = state.top.size() / item.num_heads;
  for (int head = 0; head < item.num_heads; head++)
    for (int row = 0; row < item.count * group; row++) {
      const size_t token = call.offsets[item.seq] + item.first + row / group;
      const size_t place = token * call.num_heads + (item.head + head) * group + row % group;
      const int at = head * whole + row;
      const float* from = state.out.data() + (size_t)at * width;
      for (int x = 0; x < call.head_dim; x += V)
        put((T*)call.out + place * call.head_dim + x, load<F>(from + x) / state.sum[at],
            call.head_dim - x);
    }
}

// Add the state of a further part of the same rows.
void merge(State& into, const State& part) {
  size_t rows = into.top.size(), width = into.out.size() / rows;
  for (size_t row = 0; row < rows; row++) {
    float top = std::max(into.top[row], part.top[row]);
    float old = exp2(F{} + (into.top[row] - top))[0], added = exp2(F{} + (part.top[row] - top))[0];
    into.sum[row] = into.sum[row] * old + part.sum[row] * added;
    for (size_t x = row * width; x < (row + 1) * width; x++)
      into.out[x] = into.out[x] * old + part.out[x] * added;
    into.top[row] = top;
  }
}

// Single tokens have all heads together, which lie side by side in a page, unless that is a large
// part of all: the last item is waited for.
std::vector<Item> tiles_of(const Call& call, int num_threads) {
  std::vector<Item> tiles;
  const int most = std::max(MAX_ROWS / (call.num_heads / call.num_kv_heads), 1);
  int64_t all = 0;
  for (int seq = 0; seq < call.num_seqs; seq++) all += call.start(seq) + 1;
  for (int seq = 0; seq < call.num_seqs; seq++) {
    const int total = call.total(seq), start = call.start(seq);
    const bool is_part = total == 1 && 2 * num_threads * (start + 1LL) <= all;
    const int together = is_part ? call.num_kv_heads : 1;
    for (int first = 0; first < total; first += most)
      for (int head = 0; head < call.num_kv_heads; head += together) {
        const int count = std::min(most, total - first), place = start + first;
        const int begin = call.first_seen(place), end = call.last_seen(seq, place + count - 1);
        tiles.push_back({seq, first, count, head, together, begin, end, 0, 1});
      }
  }
  return tiles;
}

std::vector<Item> split(const std::vector<Item>& tiles, int num_threads) {
  std::vector<Item> items;
  const int wanted = tiles.size() < (size_t)num_threads ? 2 * num_threads / (int)tiles.size() : 1;
  for (Item tile : tiles) {
    int total = tile.end - tile.begin, begin = tile.begin;
    tile.num_parts = std::clamp(total / MIN_PART, 1, wanted);
    int size = (total + tile.num_parts - 1) / tile.num_parts;
    tile.num_parts = (total + size - 1) / size;  // rounded up, fewer may hold them all
    for (tile.part = 0; tile.part < tile.num_parts; tile.part++) {
      Item item = tile;
      item.begin = begin + tile.part * size;
      item.end = std::min(item.begin + size, tile.end);
      items.push_back(item);
    }
  }
  return items;
}

template <class T>
void run(const Call& call, int num_threads) {
  std::vector<Item> tiles = tiles_of(call, num_threads);
  if (tiles.empty()) return;
  int64_t work = 0;
  for (const Item& tile : tiles)
    work += (int64_t)tile.count * tile.num_heads * (tile.end - tile.begin);
  work *= 2 * call.head_dim * (call.num_heads / call.num_kv_heads);
  std::vector<Item> items = split(tiles, num_threads);  // the same whoever is awake
  if (work < Team::worth(WORTH_THREADS)) num_threads = 1;
  std::vector<State> parts(items.size());
  Team::all().run(num_threads, items.size(), [&](int i, int next) {
    static thread_local Scratch scratch;
    attend<T>(call, items[i], next < 0 ? nullptr : &items[next], scratch);
    if (items[i].num_parts == 1)
      write<T>(call, items[i], scratch.state);
    else
      parts[i] = scratch.state;
  });
  for (size_t i = 0; i < items.size(); i += items[i].num_parts) {
    if (items[i].num_parts == 1) continue;
    for (int part = 1; part < items[i].num_parts; part++) merge(parts[i], parts[i + part]);
    write<T>(call, items[i], parts[i]);
  }
}

}  // namespace

extern "C" void paged_attention(int is_bf16, int num_threads, const void* query, const void* cache,
                                void* out, const int64_t* tables, const int64_t* starts,
                                const int64_t* offsets, int num_seqs, int num_pages,
                                int query_stride, int num_heads, int num_kv_heads, int head_dim,
                                int block_size, int window, float scale, float softcap) {
  Call call{query,     cache,        out,       tables,   starts,     offsets, num_seqs, num_pages,
            query_stride, num_heads, num_kv_heads, head_dim, block_size, window, scale,   softcap};
  is_bf16 ? run<bf16>(call, num_threads) : run<float>(call, num_threads);
}

extern "C" void text_attention(int is_bf16, int num_threads, const void* query, const void* keys,
                               void* out, const int64_t* offsets, int num_texts, int stride,
                               int num_heads, int head_dim, int window, int is_causal,
                               float scale) {
  Call call{query, keys, out, nullptr, nullptr, offsets, num_texts, 0, stride, num_heads, num_heads,
            head_dim, 0, window, scale, 0.0f, true, !is_causal};
  is_bf16 ? run<bf16>(call, num_threads) : run<float>(call, num_threads);
}
