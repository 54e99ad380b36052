// The processes of one job, one per rank. This file lets them meet, agree and exchange bytes on the host, and ends all
// of them when one dies or hangs.
//
// Meeting: rank 0 listens at MASTER_ADDR:MASTER_PORT, the others connect, and each says which job it means. No file is
// used that could be stale. Once all ranks are there nobody listens any more, so a running job cannot be joined. From
// then on every two ranks have their own connection for exchange().
//
// Watching: a thread of each rank sends a beat every second to rank 0, and rank 0's thread sends one to all. A
// connection that closes without goodbye is a death, noticed at once. A rank that is silent for 20 s counts as stopped.
// A rank hangs if it shows no progress for as long as expect_progress() said while it is not waiting for others on the
// host. Rank 0 then prints who it was and tells the others. All leave by _exit, whatever their main threads wait for.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "layers/gpu/error.h"

// Who this process is, according to its launcher.
struct Place {
    int rank = 0, size = 1;
    int local_rank = -1;  // among the ranks of this machine, or -1 to count them
    std::string address;  // where rank 0 listens
    int port = 0;
    std::string job;     // the launcher's name for the job; rank 0 refuses a rank with another name
    int listen_fd = -1;  // rank 0 only: a socket that listens at `port` already
};
// Reads the variables of torchrun, Open MPI, MPICH or Slurm. Without any the size is 1. Throws UsageError if they make
// no sense.
Place place_from_environment();

// --gpus N: runs this program N times on this machine, as the ranks of one job. Forwards SIGINT and SIGTERM. When a
// rank fails the others have five seconds to end. Returns 0 if all ended well. Otherwise it returns the exit code of
// the first rank that a signal killed, or if there is none, of the first that failed.
int launch_ranks(int count, char** argv);

// Listens at this address alone, of IPv4 or IPv6. A host's name may mean another address to others than to this machine,
// so it means all of this machine's IPv4 addresses. Port 0 means any free one.
int listen_at(const std::string& address, int port);
int port_of(int fd);
std::string random_name();  // that nobody can guess
double now();               // in seconds
void sleep_for(double seconds);

// How long a rank waits for others, in seconds.
struct Patience {
    double meet = 60;     // until all ranks have come
    double silence = 20;  // without a beat
};

using Fields = std::vector<std::pair<std::string, std::string>>;  // names and values

// Bytes that go to a rank or come from it.
struct Transfer {
    int peer;
    bool sends;
    char* at;
    size_t bytes;
    static Transfer to(int peer, const void* data, size_t bytes) {
        return {peer, true, static_cast<char*>(const_cast<void*>(data)), bytes};
    }
    static Transfer from(int peer, void* data, size_t bytes) { return {peer, false, static_cast<char*>(data), bytes}; }
};

class Job {
  public:
    Job();  // a job of one rank, where every call returns at once
    // Meets the others. Throws Error if the port is busy, a rank did not come, a stranger answers or sizes differ.
    explicit Job(const Place& place, const Patience& patience = {});
    ~Job();
    Job(const Job&) = delete;

    int rank = 0, size = 1;
    int local_rank = 0, local_size = 1;  // among the ranks of this machine

    // Runs all transfers at once, at most one each way with each peer, and returns when all are done. One with this
    // rank itself does nothing. Every rank must make the matching call.
    void exchange(std::vector<Transfer> transfers);

    // Collectives on the host for small data. Every rank calls them in the same order.
    std::vector<std::string> all_gather(const std::string& mine);
    template <class T>
    std::vector<T> all_gather(const T& mine) {
        static_assert(std::is_trivially_copyable_v<T>);
        std::vector<T> all(size, mine);
        gather_bytes(all.data(), sizeof(T), 0, size);
        return all;
    }
    void broadcast(void* data, size_t bytes);  // from rank 0
    void barrier() { all_gather(0); }
    // Among `count` ranks from `first` on. Each finds its own part in `all` and gets the others'.
    void gather_bytes(void* all, size_t bytes, int first, int count);

    // Throws Error on every rank if a field of one rank differs from rank 0's. The message names the field and who has
    // what.
    void agree(const Fields& fields);

    // From here on the main thread must call progress()++ at least once in this many seconds. 0 ends that duty.
    void expect_progress(double seconds);
    static std::atomic<uint64_t>& progress();
    // The watching thread calls `check` every second. It returns what is wrong, or "". Null ends the last one.
    void also_watch(std::function<std::string()> check);

    // Runs `body`. If it throws, the whole job ends with that message. Nothing outside `body` is unwound, because
    // destructors there might wait for ranks that are gone. In a job of one rank, and after leave(), it passes through.
    template <class F>
    auto guard(F body) {
        try {
            return body();
        } catch (const std::exception& e) {
            if (impl_) fail(e);
            throw;
        }
    }
    void leave();  // ends a job that went well: waits for all ranks, then stops watching

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
    [[noreturn]] void fail(const std::exception& e);
};
