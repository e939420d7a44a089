// What the registers alone can do: sums that wait for nobody, nothing read from memory.
#include "vector.h"

template <class T>
double run(int64_t rounds) {
  F sums[4][5] = {};
  for (auto& row : sums)
    for (F& x : row) asm volatile("" : "+v"(x));  // as if they were different
  W a = (W)(F{} + 1e-30f), b = (W)(F{} + 1e-30f);
  for (int64_t i = 0; i < rounds; i++) {
    asm volatile("" : "+v"(a), "+v"(b));
    for (int j = 0; j < 4; j++)
      for (int k = 0; k < 5; k++) sums[j][k] = multiply_add<T>(sums[j][k], a, b);
  }
  float total = 0;
  for (auto& row : sums)
    for (F x : row) total += sum(x);
  volatile float kept = total;
  (void)kept;
  return 2.0 * V * PER_WORD<T> * 20 * (double)rounds;
}

// Returns the floating point operations of so many rounds.
extern "C" double peak(int is_bf16, int64_t rounds) {
  return is_bf16 ? run<bf16>(rounds) : run<float>(rounds);
}
