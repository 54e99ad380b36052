#include "common/threads.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

// One group's quota in cores, infinite if there is none. The file has "max 100000" or, for one and
// a half cores, "150000 100000".
static double group_quota(const std::string& group) {
    std::ifstream file(group + "/cpu.max");
    double quota = 0;
    double period = 0;
    const bool limited = file >> quota >> period && quota > 0 && period > 0;
    return limited ? quota / period : INFINITY;
}

int cpu_quota(const std::string& root, const std::string& own) {
    double cores = group_quota(root);
    size_t slash = 0;
    while (slash != std::string::npos) {  // of "/a/b": the groups /a and /a/b
        slash = own.find('/', slash + 1);
        cores = std::min(cores, group_quota(root + own.substr(0, slash)));
    }
    return std::isinf(cores) ? 0 : static_cast<int>(std::ceil(cores));
}

// The path of this process's group, from the line "0::/path" of /proc/self/cgroup. In a container
// it is "/".
static std::string own_group() {
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with("0::"))
            return line.substr(3);
    }
    return "/";
}

// How many threads can run at once, up to `wanted`: starts that many and counts. They only wait for
// the gate, so that none ends before all have started.
static int startable_threads(int wanted) {
    std::mutex gate;
    std::vector<std::thread> others;
    {
        const std::lock_guard<std::mutex> closed(gate);
        try {
            while (static_cast<int>(others.size()) + 1 < wanted) {
                others.emplace_back([&] { const std::lock_guard<std::mutex> passed(gate); });
            }
            // NOLINTNEXTLINE(bugprone-empty-catch): these are all that the system lets us have
        } catch (const std::system_error&) {
        }
    }
    for (std::thread& other : others) {
        other.join();
    }
    return static_cast<int>(others.size()) + 1;
}

static int possible_threads() {
    // the number of cores to which this process is bound
    static const int possible = startable_threads(omp_get_num_procs());
    return possible;
}

int available_threads() {
    const int threads =
        std::min({omp_get_max_threads(), omp_get_thread_limit(), possible_threads()});
    const int quota = cpu_quota("/sys/fs/cgroup", own_group());
    return quota > 0 ? std::min(threads, quota) : threads;
}
