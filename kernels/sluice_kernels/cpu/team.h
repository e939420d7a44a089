// Threads that share out the tasks of a call.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

class Team {
 public:
  static Team& all();

  // Of what a call must have to be worth several threads: a sixteenth is enough while they are
  // awake.
  static int64_t worth(int64_t least) { return all().asleep > 0 ? least : least / 16; }

  // do_task(task, next) for each task below num_tasks; next: what the same thread is likely to do
  // afterwards, or -1. Neighbours are a thread's own as far as that goes.
  template <class Do>
  void run(int num_threads, int num_tasks, const Do& do_task) {
    if (num_threads > num_tasks) num_threads = num_tasks;
    std::unique_lock<std::mutex> alone(running, std::try_to_lock);
    if (num_threads <= 1 || !alone) {
      for (int task = 0; task < num_tasks; task++)
        do_task(task, task + 1 < num_tasks ? task + 1 : -1);
      return;
    }
    call = [](const void* what, int task, int next) { (*(const Do*)what)(task, next); };
    what = &do_task;
    open(num_threads, num_tasks);
    work(0);
    close();
  }

 private:
  struct alignas(64) Range {  // of tasks
    std::atomic<int> at{0};
    int end = 0;
  };

  void open(int num_threads, int num_tasks);
  void work(int member);
  void close();
  void live(int member);
  void await_call(uint32_t seen, int64_t tired_until, int64_t& up);

  std::mutex running;
  std::vector<std::unique_ptr<Range>> ranges;  // one of each member; the caller is member 0
  void (*call)(const void*, int, int) = nullptr;
  const void* what = nullptr;
  int members = 0;
  std::atomic<bool> is_open{false}, is_waiting{false};
  std::atomic<uint32_t> calls{0}, inside{0}, asleep{0};
};
