/* The register peak of all processors at once, in GFLOP/s of wall time: products that wait for
 * nobody and read nothing from memory. bf16 where the instructions are, else fp32.
 *
 *     peak SECONDS      prints the kind and the rate
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#ifdef __AVX512F__
#define BYTES 64
#define SUMS 20
#elif defined(__AVX__)
#define BYTES 32
#define SUMS 12
#else
#define BYTES 16
#define SUMS 12
#endif
#ifdef __AVX512BF16__
#include <immintrin.h>
#define KIND "bf16"
#define FLOPS_PER_STEP (SUMS * BYTES)
#else
#define KIND "fp32"
#define FLOPS_PER_STEP (SUMS * BYTES / 2)
#endif
#ifdef __aarch64__
#define IN_REGISTER "+w"
#else
#define IN_REGISTER "+x"
#endif

typedef float F __attribute__((vector_size(BYTES)));
enum { STEPS = 1 << 14 };

static double limit_s;
static pthread_barrier_t start;

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void steps(F *kept) {
  F sums[SUMS]; /* all different, or the compiler would make them one */
#pragma GCC unroll 20
  for (int k = 0; k < SUMS; k++) sums[k] = kept[0] + (float)k;
#ifdef __AVX512BF16__
  __m512bh a = (__m512bh)_mm512_set1_epi16(0x3000), b = a;
#else
  F a = kept[0] + 1e-9f, b = a;
#endif
  for (int i = 0; i < STEPS; i++) {
    __asm__ volatile("" : IN_REGISTER(a), IN_REGISTER(b));
#pragma GCC unroll 20
    for (int k = 0; k < SUMS; k++)
#ifdef __AVX512BF16__
      sums[k] = (F)_mm512_dpbf16_ps((__m512)sums[k], a, b);
#else
      sums[k] = sums[k] + a * b;
#endif
  }
#pragma GCC unroll 20
  for (int k = 0; k < SUMS; k++) kept[0] += sums[k];
}

static void *work(void *cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET((int)(long)cpu, &one);
  sched_setaffinity(0, sizeof one, &one);
  F kept[1] = {{0}};
  double *rate = malloc(sizeof *rate), done = 0, began;
  steps(kept);
  pthread_barrier_wait(&start);
  began = now_s();
  do {
    steps(kept);
    done += STEPS;
  } while (now_s() - began < limit_s);
  *rate = done * FLOPS_PER_STEP / (now_s() - began);
  volatile float seen = kept[0][0];
  (void)seen;
  return rate;
}

int main(int argc, char **argv) {
  cpu_set_t usable;
  pthread_t threads[CPU_SETSIZE];
  int count = 0;
  double total = 0;
  if (argc != 2 || (limit_s = atof(argv[1])) <= 0) return 2;
  sched_getaffinity(0, sizeof usable, &usable);
  pthread_barrier_init(&start, NULL, CPU_COUNT(&usable));
  for (long cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &usable)) pthread_create(&threads[count++], NULL, work, (void *)cpu);
  for (int i = 0; i < count; i++) {
    void *rate;
    pthread_join(threads[i], &rate);
    total += *(double *)rate;
    free(rate);
  }
  printf("%s %.1f\n", KIND, total / 1e9);
  return 0;
}
