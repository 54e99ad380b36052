// The processes of one job, a rank each: how they meet, agree, exchange bytes on the host, and how all of them end when
// one dies or hangs.
//
// Meeting: rank 0 listens at MASTER_ADDR:MASTER_PORT, the others connect, and each says which job it means. There is no
// file that could be stale, and once all ranks are there nobody listens any more: a running job cannot be joined. After
// that every two ranks have a connection of their own, for exchange().
//
// Watching: a thread of each rank sends a beat a second to rank 0, and rank 0's thread to all. A connection that closes
// without goodbye is a death, noticed at once; one that is silent for 20 s is a process that stands still; and a rank
// that shows no progress for as long as expect_progress() said, and does not wait for others on the host, hangs. Rank 0
// then says who it was, tells the others, and everyone leaves by _exit, whatever the main thread waits for.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "data/error.h"

// Who this process is, as its launcher says.
struct Place {
    int rank = 0, size = 1;
    int local_rank = -1;  // among the ranks of this machine; -1: count them
    std::string address;  // where rank 0 listens
    int port = 0;
    std::string job;     // the launcher's name for the job: ranks that give another one are refused
    int listen_fd = -1;  // of rank 0: a socket that listens at `port` already
};
// From torchrun's, Open MPI's, MPICH's or Slurm's variables; size 1 if there are none. Throws UsageError if they make
// no sense.
Place place_from_environment();

// How long others wait, in seconds.
struct Patience {
    double meet = 60;     // for all ranks to come
    double silence = 20;  // without a beat
};

// What to send to a rank and to receive from it.
struct Transfer {
    int peer;
    const void* send;
    size_t send_bytes;
    void* recv;
    size_t recv_bytes;
};

class Job {
  public:
    Job();  // alone: every call returns at once
    // Meets the others. Throws Error: port busy, a rank that did not come, a stranger's answer, sizes that differ.
    explicit Job(const Place& place, const Patience& patience = {});
    ~Job();
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    int rank = 0, size = 1;
    int local_rank = 0, local_size = 1;  // among the ranks of this machine

    // All transfers at once, at most one for each peer; returns when all are done. Every rank makes calls that match.
    void exchange(const std::vector<Transfer>& transfers);

    // Collectives on the host, for little things; every rank calls them in the same order.
    std::vector<std::string> all_gather(const std::string& mine);
    template <class T>
    std::vector<T> all_gather(const T& mine) {
        static_assert(std::is_trivially_copyable_v<T>);
        std::vector<T> all(size, mine);
        gather_bytes(all.data(), sizeof(T));
        return all;
    }
    template <class T>
    void broadcast(T* data, size_t count) {  // from rank 0
        broadcast_bytes(data, count * sizeof(T));
    }
    void sum(std::vector<double>& x);  // of the ranks' x, in the order of ranks
    void barrier() { all_gather(0); }

    // Throws Error on every rank if a field of one rank differs from rank 0's: which field, who has what.
    void agree(const std::vector<std::pair<std::string, std::string>>& fields);

    // From here on the main thread shows progress, by progress()++, at least once in so many seconds; 0: no more.
    void expect_progress(double seconds) {
        began_ = progress().load();
        expected_ = seconds;
    }
    static std::atomic<uint64_t>& progress();
    // Asked every second by the watching thread: "" or what is wrong.
    void also_watch(std::function<std::string()> check);

    // Runs `body`; an exception of its ends the whole job with its message, and nothing outside `body` is unwound, whose
    // destructors might wait for ranks that are gone. Alone it passes through.
    template <class F>
    auto guard(F body) {
        try {
            return body();
        } catch (const UsageError& e) {
            if (size > 1) fail(e.what(), 2);
            throw;
        } catch (const std::exception& e) {
            if (size > 1) fail(e.what(), 1);
            throw;
        }
    }
    [[noreturn]] void fail(const std::string& what, int code);
    void leave();  // the end of a job that went well: waits for all, then nobody is watched any more

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
    std::atomic<double> expected_{0};
    std::atomic<uint64_t> began_{0};  // progress() when that was expected
    void gather_bytes(void* all, size_t bytes);
    void broadcast_bytes(void* data, size_t bytes);
};

// --gpus N: runs this program N times on this machine, as the ranks of one job; forwards SIGINT and SIGTERM. When a rank
// fails the others have five seconds to end. Returns the exit code: 0 if all ended well, else that of the first rank that
// a signal killed, else of the first that failed.
int launch_ranks(int count, char** argv);
