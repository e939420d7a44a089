// Vectors of the widest kind that the target has, by GCC's vector extensions: one source for every
// instruction set. A word is 32 bits of a matrix: one float, two neighbouring
// bfloat16 or four bytes.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

// Of a product, rows and vectors that sums are kept of at once: with what they are multiplied by as
// many as there are registers.
#ifdef __AVX512F__
constexpr int V = 16;
constexpr int ROW_BLOCK = 6;
constexpr int column_block(int) { return 4; }
#else
constexpr int V = 8;
constexpr int ROW_BLOCK = 6;
constexpr int column_block(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
#endif

typedef float F __attribute__((vector_size(4 * V)));
typedef int32_t I __attribute__((vector_size(4 * V)));
typedef uint32_t W __attribute__((vector_size(4 * V)));
typedef uint16_t H __attribute__((vector_size(2 * V)));
typedef uint8_t B __attribute__((vector_size(V)));

struct bf16 {
  uint16_t bits;
};
struct int8 {  // of weights; what they are multiplied by is unsigned
  int8_t bits;
};

template <class T>
constexpr int PER_WORD = 4 / sizeof(T);

template <class X, class P>
inline X load(const P* p) {
  X x;
  memcpy(&x, p, sizeof(X));
  return x;
}

inline F widen(H h) { return (F)(__builtin_convertvector(h, W) << 16); }

inline H narrow(F f) {  // to the nearest, ties to even; what is no number stays none
#ifdef __AVX512BF16__
  return (H)_mm512_cvtneps_pbh((__m512)f);
#else
  W w = (W)f;
  W rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
  return __builtin_convertvector((f == f) ? rounded : W{} + 0x7fc0, H);
#endif
}

inline void put(float* p, F f) { memcpy(p, &f, sizeof(f)); }
inline void put(bf16* p, F f) {
  H h = narrow(f);
  memcpy(p, &h, sizeof(h));
}
inline F get(const float* p) { return load<F>(p); }
inline F get(const bf16* p) { return widen(load<H>(p)); }

// The same for the first n of a vector's elements; the others are zero, or stay as they are.
template <class T>
inline F get(const T* p, int n) {
  if (n >= V) return get(p);
  T padded[V] = {};
  memcpy(padded, p, n * sizeof(T));
  return get(padded);
}
template <class T>
inline void put(T* p, F f, int n) {
  if (n >= V) return put(p, f);
  T padded[V];
  put(padded, f);
  memcpy(p, padded, n * sizeof(T));
}

template <class X, class G, int... i>
constexpr X made(G of, std::integer_sequence<int, i...>) {
  return X{of(i)...};
}
template <class X, class G>
constexpr X made(G of) {
  return made<X>(of, std::make_integer_sequence<int, V>{});
}
constexpr I LANES = made<I>([](int i) { return i; });

inline F exp(F x) {  // 2 ulp between -87 and 88, and held there; what is no number stays none
  x = x > 88.0f ? F{} + 88.0f : x;
  x = x < -87.0f ? F{} - 87.0f : x;
  F n = x * 1.44269504f + 12582912.0f;  // rounds: the sum has no room for a fraction
  F power = (F)(((I)n << 23) + 0x3f800000);
  n -= 12582912.0f;
  F r = x - n * 0.693359375f + n * 2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return (p * r * r + r + 1.0f) * power;
}
inline F greater(F a, F b) {  // b where either is no number
#ifdef __AVX512F__
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

inline F lesser(F a, F b) {
#ifdef __AVX512F__
  return (F)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

inline F exp2(F x) {  // of x < 127, within 3e-7 of it; 0 below -127
#ifdef __AVX512F__
  const F n = (F)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT), r = x - n;
#else
  x = x < -127.0f ? F{} - 127.0f : x;
  const F n = x + 12582912.0f, r = x - (n - 12582912.0f);
#endif
  F p = r * 1.33335581e-3f + 9.61812910e-3f;
  p = p * r + 5.55041087e-2f;
  p = p * r + 2.40226507e-1f;
  p = p * r + 6.93147181e-1f;
  p = p * r + 1.0f;
#ifdef __AVX512F__
  return (F)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const F found = (F)((I)p + ((I)n << 23));
  return x == x ? found : x;  // the bits of a NaN would be taken for a power
#endif
}
inline F tanh(F x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }
inline F sigmoid(F x) {
  const F power = exp2(lesser(F{} + 126.0f, x * -1.44269504f)) + 1.0f;
#ifdef __AVX512F__
  const F near = (F)_mm512_rcp14_ps((__m512)power);
  return near * (2.0f - power * near);
#else
  return 1.0f / power;
#endif
}
inline F silu(F x) { return x * sigmoid(x); }
inline F gelu(F x) {  // the tanh form
  return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
}
inline F gelu_exact(F x) {  // by erf within 1.5e-7 (Abramowitz and Stegun, 7.1.26)
  const F z = (x < 0 ? -x : x) * 0.707106781f, t = 1.0f / (1.0f + 0.3275911f * z);
  F p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const F beyond = p * t * exp(-z * z);  // 1 - erf(z)
  return 0.5f * x * (x < 0 ? beyond : 2.0f - beyond);
}
inline F opened(F gate, bool is_gelu) { return is_gelu ? gelu(gate) : silu(gate); }

// All elements brought to one by `merge`, halves first.
template <int S = V / 2, class M>
inline float fold(F x, M merge) {
  constexpr I swapped = made<I>([](int i) { return i ^ S; });
  x = merge(x, __builtin_shuffle(x, swapped));
  if constexpr (S > 1)
    return fold<S / 2>(x, merge);
  else
    return x[0];
}
inline float sum(F x) {
  return fold(x, [](F a, F b) { return a + b; });
}
inline float largest(F x) {
  return fold(x, greater);
}

// As how many words one of T's is multiplied, one after another, where no instruction takes it
// whole: two floats, or two pairs of integers of 16 bits.
#ifdef __AVX512BF16__
template <class T>
constexpr int PARTS = 1;
#else
template <class T>
constexpr int PARTS = sizeof(T) < 4 ? 2 : 1;
#endif

// One of these. Of bytes, those of weights have signs, and those of what they multiply none.
template <class T, int PART, bool SIGNED = true>
inline W part(W word) {
  if constexpr (PARTS<T> == 1) return word;
  if constexpr (PER_WORD<T> == 2) return PART ? word & 0xffff0000 : word << 16;
  if constexpr (!SIGNED) return word >> (PART ? 8 : 0) & 0x00ff00ff;
  typedef int16_t S __attribute__((vector_size(4 * V)));
  return (W)((PART ? (S)word : (S)word << 8) >> 8);
}

// Add the product of the elements in each lane's word; of bytes in the bits of integers. By hand, as
// GCC 12 lets sums take other registers' places, and then has none left for as many as ROW_BLOCK; or
// stores a sum of one type that is added to as another, each time.
template <class T>
inline F multiply_add(F sum, W a, W b) {
  if constexpr (PER_WORD<T> == 4) {
#if defined(__AVX512VNNI__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#elif defined(__AVX2__)
    W products;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(products) : "v"(a), "v"(b));
    return sum;
#else
    return (F)((I)sum + (I)(a & 0xffff) * ((I)(b << 16) >> 16) + (I)(a >> 16) * ((I)b >> 16));
#endif
  }
#ifdef __AVX512BF16__
  if constexpr (PER_WORD<T> == 2) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
#endif
#ifdef __FMA__
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  return sum + (F)a * (F)b;
#endif
}

template <int S>
inline void swap_blocks(W (&m)[V]) {
  constexpr I low = made<I>([](int i) { return i & S ? V + i - S : i; });
  constexpr I high = made<I>([](int i) { return i & S ? V + i : i + S; });
  for (int i = 0; i < V; i++) {
    if (i & S) continue;
    W a = m[i], b = m[i + S];
    m[i] = __builtin_shuffle(a, b, low);
    m[i + S] = __builtin_shuffle(a, b, high);
  }
}
inline void transpose(W (&m)[V]) {
  swap_blocks<1>(m);
  swap_blocks<2>(m);
  swap_blocks<4>(m);
  if constexpr (V == 16) swap_blocks<8>(m);
}
