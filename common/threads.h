// How many threads the CPU's work may take.
#pragma once
#include <string>

// The smallest of OpenMP's number (OMP_NUM_THREADS, OMP_THREAD_LIMIT), the cores of this process's affinity, its
// container's quota, and what the system lets it start (ulimit -u, a container's pids.max). libgomp would end the program
// where it is refused a thread.
int available_threads();

// How many there can be at all, by affinity and system, whatever OpenMP's variables say.
int possible_threads();

// The CPU quota of this process's control group and of those around it, in cores, rounded up; 0 if there is none. `own`
// is its path below `groups`, as /proc/self/cgroup has it.
int cpu_quota(const std::string& groups, const std::string& own);
