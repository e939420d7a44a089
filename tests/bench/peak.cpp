// What the registers alone can do: sums that wait for nobody, nothing read from memory.
#include "vector.h"

constexpr int SUMS = V == 16 ? 20 : 12;  // as many as there are registers for

template <class T>
double run(int64_t rounds) {
  F sums[SUMS] = {};
  for (F& x : sums) asm volatile("" : "+v"(x));  // as if they were different
  W a = (W)(F{} + 1e-30f), b = (W)(F{} + 1e-30f);
  for (int64_t i = 0; i < rounds; i++) {
    asm volatile("" : "+v"(a), "+v"(b));
    for (F& x : sums) x = multiply_add<T>(x, a, b);
  }
  float total = 0;
  for (F x : sums) total += sum(x);
  volatile float kept = total;
  (void)kept;
  return 2.0 * V * (PER_WORD<T> / PARTS<T>)*SUMS * (double)rounds;
}

// Returns the floating point operations of so many rounds.
extern "C" double peak(int is_bf16, int64_t rounds) {
  return is_bf16 ? run<bf16>(rounds) : run<float>(rounds);
}
