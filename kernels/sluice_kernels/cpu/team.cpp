// A step has some sixty calls of a few dozen microseconds, and a thread takes as long to wake (on a
// virtual machine 100 us were measured). So threads stay awake for a little when a call is done,
// but only where they have their processors to themselves: one that had to wait for its own goes to
// sleep at once, for others need it. Nobody waits for a thread that comes late: its tasks are done
// by then.
#include "team.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <system_error>
#include <thread>

namespace {

constexpr int64_t AWAKE_NS = 300'000;       // more than most gaps between two calls of a step
constexpr int64_t JUDGED_NS = 20'000'000;   // of being up, in which
constexpr double MOST_WAITED = 0.1;         // may be spent waiting for a processor
constexpr int64_t TIRED_NS = 200'000'000;   // otherwise so long without staying awake
constexpr int TRIES = 1000;                 // of some 45 ns, before a caller sleeps

int64_t now(clockid_t clock = CLOCK_MONOTONIC) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, value, nullptr);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT_MAX);
}

}  // namespace

Team& Team::all() {
  static Team* team = new Team;  // never ends: its threads are the process's
  return *team;
}

void Team::open(int num_threads, int num_tasks) {
  for (int i = ranges.size(); i < num_threads; i++) {
    ranges.emplace_back(new Range);
    if (i == 0) continue;
    try {
      std::thread([this, i] { live(i); }).detach();
    } catch (const std::system_error&) {  // no more threads may be: the others take its tasks
    }
  }
  for (int i = 0; i < num_threads; i++) {
    ranges[i]->at = (int64_t)num_tasks * i / num_threads;
    ranges[i]->end = (int64_t)num_tasks * (i + 1) / num_threads;
  }
  members = num_threads;
  is_open = true;
  calls++;
  if (asleep > 0) wake_all(calls);
}

// A member's own tasks first, then what others have left.
void Team::work(int member) {
  for (int other = 0; other < members; other++) {
    Range& range = *ranges[(member + other) % members];
    for (int task; (task = range.at++) < range.end;)
      call(what, task, task + 1 < range.end ? task + 1 : -1);
  }
}

// Once it is shut nobody comes in, and whoever is inside has a task.
void Team::close() {
  is_open = false;
  for (int tries = 0; inside > 0 && tries < TRIES; tries++) rest();
  is_waiting = true;
  for (uint32_t count; (count = inside) > 0;) sleep_while(inside, count);
  is_waiting = false;
}

void Team::live(int member) {
  int64_t up = now(), ran = now(CLOCK_THREAD_CPUTIME_ID), tired_until = 0;
  for (uint32_t seen = 0;;) {
    await_call(seen, tired_until, up);
    seen = calls;
    if (is_open) {  // if it still is when this thread is counted
      inside++;
      if (is_open && member < members) work(member);
      if (--inside == 0 && is_waiting) wake_all(inside);
    }
    const int64_t t = now();
    if (t - up < JUDGED_NS) continue;
    const int64_t cpu = now(CLOCK_THREAD_CPUTIME_ID);
    if (t - up - (cpu - ran) > MOST_WAITED * (t - up)) tired_until = t + TIRED_NS;
    up = t, ran = cpu;
  }
}

// `up`, since when a thread is, moves by what was slept.
void Team::await_call(uint32_t seen, int64_t tired_until, int64_t& up) {
  int64_t begun = now();
  const int64_t awake_until = begun < tired_until ? begun : begun + AWAKE_NS;
  while (calls == seen) {
    for (int i = 0; i < 16 && calls == seen; i++) rest();
    if (calls != seen || (begun = now()) < awake_until) continue;
    asleep++;
    sleep_while(calls, seen);
    asleep--;
    up += now() - begun;
  }
}
