// Threads as ranks, for tests. ThreadComm has NcclComm's interface (parallel/comm.h). All ranks
// share one device, the CPU or a GPU. What a rank sends is copied to the host and waits there until
// it is received. Sums are taken in the order of ranks, so every rank and every run gets the same
// bits.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "layers/cpu/reference.h"

// What threads have sent to each other and not yet received.
struct Mail {
    using Bytes = std::vector<char>;
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::pair<int, int>, std::deque<Bytes>> boxes;  // by sender and receiver
    std::map<int, bool> ended;
    std::exception_ptr error;  // of the first rank that threw

    // Waits for a message. Throws if the sender has ended and there will be none. So an error of
    // one rank reaches all that wait for it.
    Bytes take(int from, int to, size_t bytes) {
        std::unique_lock<std::mutex> lock(mutex);
        std::deque<Bytes>& box = boxes[{from, to}];
        changed.wait(lock, [&] { return !box.empty() || ended[from]; });
        if (box.empty())
            throw Error(format("rank %d waits for rank %d, which has ended", to, from));

        Bytes sent = std::move(box.front());
        box.pop_front();
        if (sent.size() != bytes)
            throw Error(format("rank %d sent rank %d %zu bytes, but %zu were expected", from, to,
                               sent.size(), bytes));
        return sent;
    }
};

template <class Dev>
class ThreadCommOn {
  public:
    const int rank;
    const int size;

    ThreadCommOn(const Dev& dev, Mail& mail, int rank, int size)
        : rank(rank), size(size), dev_(dev), mail_(mail) {}
    // A communicator of the `count` ranks from `first` on.
    ThreadCommOn(ThreadCommOn& all, int first, int count)
        : rank(all.rank - first),
          size(count),
          dev_(all.dev_),
          mail_(all.mail_),
          first_(all.first_ + first) {}

    // NCCL's calls are done at any time between fork() and join(). These wait until join(), so that
    // a test sees who reads a result, or changes an operand, too early.
    void fork() { forked_ = true; }
    void join() {
        forked_ = false;
        finish_calls();
    }
    void head_start() {}
    template <class Calls>
    void group(Calls calls) {
        calls();
    }
    std::string error() const { return ""; }

    template <class A>
    void all_reduce(A* x, size_t n) {
        at_join([=, this] {
            for (int r = 0; r < size; r++)
                put(r, x, n * sizeof(A));
            add_up(x, n);
        });
    }
    template <class A>
    void reduce_scatter(A* out, const A* x, size_t n) {
        at_join([=, this] {
            for (int r = 0; r < size; r++)
                put(r, x + r * n, n * sizeof(A));
            add_up(out, n);
        });
    }
    template <class X>
    void all_gather(X* x, size_t n) {
        at_join([=, this] {
            for (int r = 0; r < size; r++)
                put(r, x + rank * n, n * sizeof(X));
            for (int r = 0; r < size; r++)
                get(r, x + r * n, n * sizeof(X));
        });
    }
    template <class X>
    void send_recv(int to, const X* sent, size_t n, int from, X* received, size_t m) {
        send(to, sent, n * sizeof(X));
        recv(from, received, m * sizeof(X));
    }
    void broadcast(void* x, size_t bytes) {
        at_join([=, this] {
            if (rank == 0)
                for (int r = 0; r < size; r++)
                    put(r, x, bytes);
            get(0, x, bytes);
        });
    }
    void send(int to, const void* x, size_t bytes) {
        at_join([=, this] { put(to, x, bytes); });
    }
    void recv(int from, void* x, size_t bytes) {
        at_join([=, this] { get(from, x, bytes); });
    }

    // For host memory. Returns when `all` is complete, as NcclComm's does. As on NCCL's stream, the
    // calls since fork() come first, so they do not wait until join().
    void host_all_gather(void* all, size_t bytes) {
        finish_calls();
        char* const x = static_cast<char*>(all);
        const char* const mine = x + rank * bytes;
        for (int r = 0; r < size; r++)
            put(r, Mail::Bytes(mine, mine + bytes));
        for (int r = 0; r < size; r++)
            std::memcpy(x + r * bytes, take(r, bytes).data(), bytes);
    }

  private:
    const Dev& dev_;
    Mail& mail_;
    const int first_ = 0;  // the number of our rank 0 among all
    bool forked_ = false;
    std::vector<std::function<void()>> calls_;  // since fork()

    void at_join(std::function<void()> call) {
        if (!forked_)
            throw Error("a collective was called outside of fork() and join()");
        calls_.push_back(std::move(call));
    }
    void finish_calls() {
        for (const auto& call : std::exchange(calls_, {}))
            call();
    }
    // x is on the device.
    void put(int to, const void* x, size_t bytes) {
        Mail::Bytes copy(bytes);
        dev_.download(copy.data(), x, bytes);
        put(to, std::move(copy));
    }
    void get(int from, void* x, size_t bytes) { dev_.upload(x, take(from, bytes).data(), bytes); }

    void put(int to, Mail::Bytes bytes) {
        const std::lock_guard<std::mutex> lock(mail_.mutex);
        mail_.boxes[{first_ + rank, first_ + to}].push_back(std::move(bytes));
        mail_.changed.notify_all();
    }
    Mail::Bytes take(int from, size_t bytes) {
        return mail_.take(first_ + from, first_ + rank, bytes);
    }
    // Receives n elements from every rank and writes their sums.
    template <class A>
    void add_up(A* out, size_t n) {
        std::vector<A> sum(n);
        std::vector<A> part(n);
        for (int r = 0; r < size; r++) {
            std::memcpy(part.data(), take(r, n * sizeof(A)).data(), n * sizeof(A));
            for (size_t i = 0; i < n; i++)
                sum[i] = r == 0 ? part[i] : sum[i] + part[i];
        }
        dev_.upload(out, sum.data(), n * sizeof(A));
    }
};

using ThreadComm = ThreadCommOn<Cpu>;

// A CPU that is one of several ranks.
struct Threads : Cpu {
    using Comm = ThreadComm;
    using Cpu::Cpu;
    std::function<void(void* to, size_t bytes)> after_upload;  // may change what has been uploaded

    void upload(void* to, const void* host, size_t bytes) const {
        Cpu::upload(to, host, bytes);
        if (after_upload)
            after_upload(to, bytes);
    }
};

// Every rank's value, by rank.
template <class T, class Comm>
std::vector<T> all_gather_values(Comm& comm, T mine) {
    std::vector<T> all(comm.size, mine);
    comm.host_all_gather(all.data(), sizeof(T));
    return all;
}

// Calls body(rank, comm) in each of `ranks` threads. When all have ended, throws the error of the
// first that threw, if any did.
template <class Body, class Dev = Cpu>
void on_threads(int ranks, Body body, const Dev& dev = Cpu(1)) {
    Mail mail;
    const auto run = [&](int rank) {
        std::exception_ptr error;
        try {
            // its constructor sets how many OpenMP threads this thread may start
            const Cpu one_thread(1);
            dev.use();
            ThreadCommOn<Dev> comm(dev, mail, rank, ranks);
            body(rank, comm);
        } catch (...) {
            error = std::current_exception();
        }
        const std::lock_guard<std::mutex> lock(mail.mutex);
        mail.ended[rank] = true;
        if (!mail.error)
            mail.error = error;
        mail.changed.notify_all();
    };

    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; rank++)
        threads.emplace_back(run, rank);
    for (std::thread& thread : threads)
        thread.join();
    if (mail.error)
        std::rethrow_exception(mail.error);
}
