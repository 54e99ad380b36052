// How many CPU threads to use, and what to do if no more can be started.
#pragma once
#include <future>
#include <string>
#include <system_error>

// The smallest of four limits: OpenMP's (OMP_NUM_THREADS, OMP_THREAD_LIMIT), the cores to which
// this process is bound, its container's CPU quota, and how many threads the system lets it start
// (ulimit -u, a container's pids.max). If libgomp is refused a thread, it ends the program.
int available_threads();

// The CPU quota of this process's control group and of all groups around it, in cores, rounded up;
// 0 if there is none. `root` is where groups are mounted, and `own` the path of this process's
// group below it, as in /proc/self/cgroup.
int cpu_quota(const std::string& root, const std::string& own);

// Calls f in a new thread or, if the system allows no more threads, right here. The future has f's
// result or exception.
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
