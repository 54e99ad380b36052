#include "data/threads.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <fstream>

// A group's cpu.max is "max 100000" or, for one and a half cores, "150000 100000".
static double quota_of(const std::string& group) {
    std::ifstream file(group + "/cpu.max");
    double quota = 0;
    double period = 0;
    return file >> quota >> period && quota > 0 && period > 0 ? quota / period : INFINITY;
}

int cpu_quota(const std::string& groups, const std::string& own) {
    double cores = quota_of(groups);
    for (size_t slash = own.find('/', 1);; slash = own.find('/', slash + 1)) {
        cores = std::min(cores, quota_of(groups + own.substr(0, slash)));
        if (slash == std::string::npos) break;
    }
    return std::isinf(cores) ? 0 : static_cast<int>(std::ceil(cores));
}

// The line "0::/path" of /proc/self/cgroup names the group. In a container it is "/".
static std::string own_group() {
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, 3, "0::") == 0) return line.substr(3);
    }
    return "/";
}

int available_threads() {
    int threads = std::min(omp_get_max_threads(), omp_get_thread_limit());
    threads = std::min(threads, omp_get_num_procs());  // which is the affinity's number
    const int quota = cpu_quota("/sys/fs/cgroup", own_group());
    return quota > 0 ? std::min(threads, quota) : threads;
}
