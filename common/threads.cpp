#include "common/threads.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

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
        if (slash == std::string::npos)
            break;
    }
    return std::isinf(cores) ? 0 : static_cast<int>(std::ceil(cores));
}

// The line "0::/path" of /proc/self/cgroup names the group. In a container it is "/".
static std::string own_group() {
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, 3, "0::") == 0)
            return line.substr(3);
    }
    return "/";
}

// How many threads there can be, of so many, found out with threads that do nothing.
static int startable_threads(int wanted) {
    std::mutex all_have_started;
    std::vector<std::thread> others;
    {
        const std::lock_guard<std::mutex> lock(all_have_started);
        try {
            while (static_cast<int>(others.size()) + 1 < wanted) {
                others.emplace_back(
                    [&] { const std::lock_guard<std::mutex> wait(all_have_started); });
            }
            // NOLINTNEXTLINE(bugprone-empty-catch): others.size() of them is what we get
        } catch (const std::system_error&) {
        }
    }
    for (std::thread& other : others) {
        other.join();
    }
    return static_cast<int>(others.size()) + 1;
}

static int possible_threads() {
    static const int possible = startable_threads(omp_get_num_procs());  // the affinity's number
    return possible;
}

int available_threads() {
    const int threads =
        std::min({omp_get_max_threads(), omp_get_thread_limit(), possible_threads()});
    const int quota = cpu_quota("/sys/fs/cgroup", own_group());
    return quota > 0 ? std::min(threads, quota) : threads;
}
