// What is done to each token's row between the matrix products: norms, rotary positions, gates, and
// the scales of int8. All arithmetic is float32; the result is rounded once.
#include <algorithm>
#include <cmath>

#include "exported.h"
#include "rows.h"

namespace {

template <class T>
float root_mean_square(const T* row, int width, float eps) {
  F squares = F{};
  for (int x = 0; x < width; x += V) {
    F v = get(row + x, width - x);
    squares += v * v;
  }
  return std::sqrt(sum(squares) / width + eps);
}

template <class T>
void add_norm(int num_threads, T* residual, const T* hidden, const float* weight, T* out, int rows,
              int width, float eps) {
  for_rows(num_threads, rows, width, [&](int64_t row) {
    T *s = residual + row * width, *o = out + row * width;
    if (hidden)
      for (int x = 0; x < width; x += V) {
        int n = width - x;
        put(s + x, get(s + x, n) + get(hidden + row * width + x, n), n);
      }
    float shrunk = 1.0f / root_mean_square(s, width, eps);
    for (int x = 0; x < width; x += V) {
      int n = width - x;
      put(o + x, get(s + x, n) * shrunk * get(weight + x, n), n);
    }
  });
}

// A row and what is added to it, at mean 0 and deviation 1, times weight plus bias. `added` and `bias`
// may be none.
template <class T>
void layer_norm(int num_threads, const T* rows, const T* added, const float* weight,
                const float* bias, T* out, int num_rows, int width, float eps) {
  for_rows(num_threads, num_rows, width, [&](int64_t row) {
    const T *r = rows + row * width, *a = added ? added + row * width : nullptr;
    const auto at = [&](int x) {
      const F v = get(r + x, width - x);
      return a ? v + get(a + x, width - x) : v;
    };
    F total = F{}, squares = F{};
    for (int x = 0; x < width; x += V) total += at(x);
    const float mean = sum(total) / width;
    for (int x = 0; x < width; x += V) {
      F off = at(x) - mean;
      if (x + V > width) off = LANES + x < width ? off : F{};
      squares += off * off;
    }
    const float shrunk = 1.0f / std::sqrt(sum(squares) / width + eps);
    for (int x = 0; x < width; x += V) {
      const int n = width - x;
      F v = (at(x) - mean) * shrunk * get(weight + x, n);
      if (bias) v += get(bias + x, n);
      put(out + row * width + x, v, n);
    }
  });
}

template <class T>
void gelu_rows(int num_threads, int is_tanh, T* rows, int num_rows, int width) {
  for_rows(num_threads, num_rows, width, [&](int64_t row) {
    T* r = rows + row * width;
    for (int x = 0; x < width; x += V) {
      const F v = get(r + x, width - x);
      put(r + x, is_tanh ? gelu(v) : gelu_exact(v), width - x);
    }
  });
}

// rotary: for each pair of neighbours, by what they are multiplied as a complex number.
template <class T>
void turn(T* head, const float* rotary, const float* weight, int head_dim, float eps) {
  constexpr I swapped = made<I>([](int i) { return i ^ 1; });
  constexpr I real = made<I>([](int i) { return i & ~1; });
  constexpr I imaginary = made<I>([](int i) { return i | 1; });
  constexpr I odd = made<I>([](int i) { return -(i & 1); });
  float shrunk = weight ? 1.0f / root_mean_square(head, head_dim, eps) : 1.0f;
  for (int x = 0; x < head_dim; x += V) {
    int n = head_dim - x;
    F v = get(head + x, n), by = get(rotary + x, n);
    if (weight) v = v * shrunk * get(weight + x, n);
    F across = __builtin_shuffle(v, swapped) * __builtin_shuffle(by, imaginary);
    put(head + x, v * __builtin_shuffle(by, real) + (odd ? across : -across), n);
  }
}

template <class T>
void rope_and_store(int num_threads, T* heads, const float* rotary, const float* weight, T* cache,
                    const int64_t* blocks, const int64_t* slots, int tokens, int num_heads,
                    int num_kv_heads, int head_dim, int block_size, float eps) {
  const int turning = num_heads + num_kv_heads, all = turning + num_kv_heads;
  for_rows(num_threads, tokens, all * head_dim, [&](int64_t token) {
    T* row = heads + token * all * head_dim;
    for (int h = 0; h < turning; h++)
      turn(row + h * head_dim, rotary + token * head_dim, weight ? weight + h * head_dim : nullptr,
           head_dim, eps);
    for (int h = 0; h < 2 * num_kv_heads; h++) {
      size_t page = (blocks[token] * 2 * num_kv_heads + h) * block_size + slots[token];
      memcpy(cache + page * head_dim, row + (num_heads + h) * head_dim, sizeof(T) * head_dim);
    }
  });
}

template <class T>
void gate(int num_threads, int is_gelu, const T* gate_up, T* out, int rows, int width) {
  for_rows(num_threads, rows, 2 * width, [&](int64_t row) {
    const T *g = gate_up + row * 2 * width, *up = g + width;
    for (int x = 0; x < width; x += V) {
      int n = width - x;
      F open = get(g + x, n);
      put(out + row * width + x, opened(open, is_gelu) * get(up + x, n), n);
    }
  });
}

template <class T>
void scale(int num_threads, T* products, const float* scales, const float* bias, int rows,
           int width) {
  for_rows(num_threads, rows, width, [&](int64_t row) {
    T* product = products + row * width;
    for (int x = 0; x < width; x += V) {
      int n = width - x;
      F v = get(product + x, n) * scales[row];
      if (bias) v += get(bias + x, n);
      put(product + x, v, n);
    }
  });
}

}  // namespace

// Call the instance for the dtype of the rows.
#define FOR_DTYPE(call)  \
  if (is_bf16) {         \
    using T = bf16;      \
    call;                \
  } else {               \
    using T = float;     \
    call;                \
  }

extern "C" {

void add_norm(int is_bf16, int num_threads, void* residual, const void* hidden, const float* weight,
              void* out, int rows, int width, float eps) {
  FOR_DTYPE(add_norm(num_threads, (T*)residual, (const T*)hidden, weight, (T*)out, rows, width, eps))
}

void layer_norm(int is_bf16, int num_threads, const void* rows, const void* added,
                const float* weight, const float* bias, void* out, int num_rows, int width,
                float eps) {
  FOR_DTYPE(layer_norm(num_threads, (const T*)rows, (const T*)added, weight, bias, (T*)out, num_rows,
                       width, eps))
}

void gelu_rows(int is_bf16, int num_threads, int is_tanh, void* rows, int num_rows, int width) {
  FOR_DTYPE(gelu_rows(num_threads, is_tanh, (T*)rows, num_rows, width))
}

void rope_and_store(int is_bf16, int num_threads, void* heads, const float* rotary,
                    const float* weight, void* cache, const int64_t* blocks, const int64_t* slots,
                    int tokens, int num_heads, int num_kv_heads, int head_dim, int block_size,
                    float eps) {
  FOR_DTYPE(rope_and_store(num_threads, (T*)heads, rotary, weight, (T*)cache, blocks, slots, tokens,
                           num_heads, num_kv_heads, head_dim, block_size, eps))
}

void gate(int is_bf16, int num_threads, int is_gelu, const void* gate_up, void* out, int rows,
          int width) {
  FOR_DTYPE(gate(num_threads, is_gelu, (const T*)gate_up, (T*)out, rows, width))
}

void to_bytes(int is_bf16, int num_threads, const void* in, uint8_t* out, float* scales, int rows,
              int width) {
  FOR_DTYPE(to_bytes(num_threads, (const T*)in, out, scales, rows, width))
}

void scale(int is_bf16, int num_threads, void* products, const float* scales, const float* bias,
           int rows, int width) {
  FOR_DTYPE(scale(num_threads, (T*)products, scales, bias, rows, width))
}
}
