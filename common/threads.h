// How many threads the CPU's work may take, and what happens where there are no more.
#pragma once
#include <future>
#include <string>
#include <system_error>

// The smallest of OpenMP's number (OMP_NUM_THREADS, OMP_THREAD_LIMIT), the cores of this process's
// affinity, its container's quota, and what the system lets it start (ulimit -u, a container's
// pids.max). libgomp would end the program where it is refused a thread.
int available_threads();

// The CPU quota of this process's control group and of those around it, in cores, rounded up; 0 if
// there is none. `own` is its path below `groups`, as /proc/self/cgroup has it.
int cpu_quota(const std::string& groups, const std::string& own);

// Calls f in a thread, or at once where the system has no more threads (ulimit -u, a container's
// pids.max). The future has f's result or what it throws.
template <class F>
auto start_async(F f) {
    try {
        return std::async(std::launch::async, f);
    } catch (const std::system_error&) {
        std::packaged_task<decltype(f())()> task(f);
        auto result = task.get_future();
        task();
        return result;
    }
}
