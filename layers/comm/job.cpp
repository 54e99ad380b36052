// How the ranks of a job meet, exchange and watch each other (see job.h).
//
// Every connection begins with a hello. It has a name, and the rank, job size, pid, port and host of the rank that
// connects. Rank r > 0 first says hello to rank 0 by the job's name. Rank 0 answers "no" and why. Or, when all are
// there, it answers "yes", a random key and the table of all ranks. These connections carry the beats from then on. For
// exchange() every rank connects to the ranks below it and says hello by the key, so that nothing else gets in.
#include "layers/comm/job.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>

namespace {

double now() {  // in seconds
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void sleep_for(double seconds) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}
void append(std::string& list, const std::string& item, const char* separator = ", ") {
    list += (list.empty() ? "" : separator) + item;
}

// A connection, or none if fd is -1. A call on it blocks for at most its timeout.
struct Socket {
    int fd = -1;
    Socket() = default;
    explicit Socket(int fd) : fd(fd) {
        const int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        set_timeout(5);
    }
    Socket(Socket&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
    Socket& operator=(Socket&& other) noexcept { return std::swap(fd, other.fd), *this; }
    ~Socket() { close(fd); }
    explicit operator bool() const { return fd >= 0; }

    void set_timeout(double seconds) const {
        const long us = std::max(1L, static_cast<long>(seconds * 1e6));  // 0 would be forever
        const timeval t = {us / 1000000, us % 1000000};
        for (int which : {SO_RCVTIMEO, SO_SNDTIMEO}) setsockopt(fd, SOL_SOCKET, which, &t, sizeof t);
    }
};

// A message is text behind a magic and a length.
bool send_message(const Socket& s, const std::string& text) {
    const std::string all = format("gpt2job1%08zx", text.size()) + text;
    return send(s.fd, all.data(), all.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(all.size());
}
bool recv_all(const Socket& s, void* data, size_t bytes) {
    ssize_t n;
    while ((n = recv(s.fd, data, bytes, MSG_WAITALL)) < 0 && errno == EINTR) {}  // we were stopped and go on
    return n == static_cast<ssize_t>(bytes);
}
bool recv_message(const Socket& s, std::string& text) {
    char header[17] = "";
    unsigned bytes = 0;
    if (!recv_all(s, header, 16) || std::sscanf(header, "gpt2job1%8x", &bytes) != 1 || bytes > 1 << 20) return false;
    text.resize(bytes);
    return recv_all(s, text.data(), bytes);
}

// The address and port of an end of a connection, which `get` says: getsockname or getpeername.
std::pair<std::string, std::string> end_of(int fd, int (*get)(int, sockaddr*, socklen_t*)) {
    sockaddr_storage a = {};
    socklen_t length = sizeof a;
    char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
    get(fd, reinterpret_cast<sockaddr*>(&a), &length);
    getnameinfo(reinterpret_cast<sockaddr*>(&a), length, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    return {host, port};
}

// Tries again until the deadline, because the other rank may start later than we.
Socket connect_to(const std::string& host, int port, double deadline, const std::string& whom) {
    int error = 0;
    for (; now() < deadline; sleep_for(0.05)) {
        addrinfo hints = {}, *found = nullptr;
        hints.ai_socktype = SOCK_STREAM;
        if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found)) error = EADDRNOTAVAIL;
        const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
        for (const addrinfo* a = found; a; a = a->ai_next) {
            Socket s(socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
            error = connect(s.fd, a->ai_addr, a->ai_addrlen) ? errno : 0;
            if (error == EINPROGRESS) error = ETIMEDOUT;
            // While nobody listens on the port, this socket may connect to itself. It would then hold the port that
            // rank 0 wants to listen on.
            if (error == 0 && end_of(s.fd, getsockname) == end_of(s.fd, getpeername)) error = ECONNREFUSED;
            if (error == 0) return s;
        }
    }
    throw Error(format("cannot reach %s at %s port %d: %s; is it running, and are MASTER_ADDR and MASTER_PORT right?",
                       whom.c_str(), host.c_str(), port, std::strerror(error)));
}

// What the watching threads send each other, as a message. The text of a failure follows it.
struct Beat {
    enum Kind : int32_t { kAlive, kFailed, kGoodbye } kind;
    int32_t code;       // exit code of a failure
    double expected;    // the main thread must make progress in this many seconds; 0 if it need not or waits for others
    uint64_t progress;  // of this process
    uint64_t come;      // progress since the last expect_progress()
};

// What this rank knows of a rank. Rank 0 watches all, itself too but without a connection. The others watch rank 0.
struct Rank {
    std::string host, address;
    int pid = 0, port = 0;
    Socket data;                  // for exchange()
    Socket watched;               // for beats, until the other says goodbye
    double heard = 0, moved = 0;  // when
    Beat last = {};

    void hear(const Beat& beat) {
        heard = now();
        if (beat.expected == 0 || beat.expected != last.expected || beat.progress != last.progress) moved = heard;
        last = beat;
    }
    bool stalled(double share) const { return last.expected > 0 && now() - moved > share * last.expected; }
};

}  // namespace

int listen_at(const std::string& address, int port) {
    const bool loopback = address == "localhost" || address == "127.0.0.1";
    Socket s(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;  // lets us take a port whose last connections have only just closed
    setsockopt(s.fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in a = {};
    a.sin_family = AF_INET;
    a.sin_port = htons(static_cast<uint16_t>(port));
    a.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
    if (bind(s.fd, reinterpret_cast<sockaddr*>(&a), sizeof a) || listen(s.fd, 1024))
        throw Error(format("cannot listen on port %d: %s%s", port, std::strerror(errno),
                           port ? "; another job or program may have it: set another MASTER_PORT" : ""));
    return std::exchange(s.fd, -1);
}
int port_of(int fd) {
    return std::stoi(end_of(fd, getsockname).second);
}
std::string random_name() {
    std::random_device random;
    return format("%08x%08x", random(), random());
}

// =====================================================================================================================

struct Job::Impl {
    Job& job;
    const Place place;
    const Patience patience;
    std::vector<Rank> ranks;
    std::atomic<bool> waiting{false}, leaving{false};
    std::mutex sending, checking;
    std::function<std::string()> check;
    std::thread watcher;

    Impl(Job& job, const Place& place, const Patience& patience)
        : job(job), place(place), patience(patience), ranks(job.size) {}
    ~Impl() { stop_watching(); }

    std::string title(int rank) const {
        return format("rank %d (pid %d on %s)", rank, ranks[rank].pid, ranks[rank].host.c_str());
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Meeting

    void meet() {
        const bool first = job.rank == 0;
        const Socket listener(place.listen_fd >= 0 ? place.listen_fd
                                                   : listen_at(place.address, first ? place.port : 0));
        Rank& me = ranks[job.rank];
        char host[256] = "";
        gethostname(host, sizeof host - 1);
        me.host = host, me.address = "127.0.0.1", me.pid = static_cast<int>(getpid()), me.port = port_of(listener.fd);
        const std::string key = first ? gather_ranks(listener) : come_to_first();

        const double deadline = now() + patience.meet;
        for (int r = 0; r < job.rank; r++) {
            ranks[r].data = connect_to(ranks[r].address, ranks[r].port, deadline, title(r));
            send_message(ranks[r].data, hello(key));
        }
        accept_ranks(listener, job.rank + 1, key);
    }

    std::string hello(const std::string& name) const {
        const Rank& me = ranks[job.rank];
        return format("%s\n%d %d %d %d %s", name.c_str(), job.rank, job.size, me.pid, me.port, me.host.c_str());
    }

    // Waits until the ranks from `begin` on have connected.
    void accept_ranks(const Socket& listener, int begin, const std::string& name) {
        for (const double deadline = now() + patience.meet;;) {
            std::string missing;
            for (int r = begin; r < job.size; r++)
                if (!ranks[r].data) append(missing, std::to_string(r));
            if (missing.empty()) return;
            if (now() >= deadline)
                throw Error(format("of %d ranks these did not come to port %d in %.0f s: %s; look at their output",
                                   job.size, ranks[job.rank].port, patience.meet, missing.c_str()));
            listener.set_timeout(deadline - now());
            const int fd = accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC);
            if (fd >= 0) welcome(Socket(fd), begin, name);
        }
    }

    // Receives a hello and keeps the connection, or refuses it with the reason. If the refused rank means this very
    // job, the job fails as well.
    void welcome(Socket connection, int begin, const std::string& name) {
        std::string text, named, host, refusal;
        int r = 0, n = 0, pid = 0, port = 0;
        if (!recv_message(connection, text)) return;  // not one of us
        std::istringstream in(text);
        if (!std::getline(in, named) || !(in >> r >> n >> pid >> port >> host)) return;
        if (named != name && named == place.job) return;  // all have come already
        const std::string who = format("rank %d (pid %d on %s)", r, pid, host.c_str());
        if (named != name)
            refusal = format("port %d is that of another job (\"%s\", this one is \"%s\"): set another MASTER_PORT",
                             place.port, place.job.c_str(), named.c_str());
        else if (n != job.size)
            refusal = format("%s was started as one of %d ranks, rank 0 as one of %d: start all with the same number",
                             who.c_str(), n, job.size);
        else if (r < begin || r >= n || ranks[r].data)
            refusal = format("%s has come already, now %s: two processes have the same rank, or an earlier job waits",
                             title(r >= 0 && r < n ? r : 0).c_str(), who.c_str());
        if (!refusal.empty()) {
            send_message(connection, "no " + refusal);
            if (named != name) return;
            throw Error(refusal);
        }
        Rank& rank = ranks[r];
        rank.host = host, rank.pid = pid, rank.port = port;
        rank.address = end_of(connection.fd, getpeername).first;
        rank.data = std::move(connection);
    }

    // On rank 0. Like come_to_first() it returns the key.
    std::string gather_ranks(const Socket& listener) {
        accept_ranks(listener, 1, place.job);
        const std::string key = random_name();
        std::string table = "yes " + key;
        for (const Rank& r : ranks) table += format("\n%s %s %d %d", r.host.c_str(), r.address.c_str(), r.pid, r.port);
        for (Rank& r : ranks) {
            send_message(r.data, table);
            r.watched = std::move(r.data);
        }
        return key;
    }

    std::string come_to_first() {
        const std::string where = format("%s port %d", place.address.c_str(), place.port);
        Socket s = connect_to(place.address, place.port, now() + patience.meet, "rank 0");
        s.set_timeout(patience.meet + 5);  // so that rank 0, which waits for `meet`, can still say what is wrong
        std::string answer, verdict, key;
        if (!send_message(s, hello(place.job)) || !recv_message(s, answer))
            throw Error(where + ": what answers is not rank 0 of this job, or it has failed: see rank 0's output, or " +
                        "set another MASTER_PORT");
        std::istringstream in(answer);
        in >> verdict >> key;
        if (verdict == "no") throw Error(where + ": refused by rank 0:" + answer.substr(2));
        for (Rank& r : ranks) {
            in >> r.host >> r.address >> r.pid >> r.port;
            // A loopback address is that of rank 0's machine, which others reach by MASTER_ADDR.
            if (r.address.compare(0, 4, "127.") == 0 || r.address == "::1") r.address = place.address;
        }
        if (verdict != "yes" || !in) throw Error(where + ": an answer that makes no sense");
        ranks[0].watched = std::move(s);
        return key;
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Watching and ending

    Beat beat_of(Beat::Kind kind, int code = 0) const {
        const uint64_t began = job.began_, so_far = progress();
        return {kind, code, waiting || leaving ? 0 : job.expected_.load(), so_far, so_far - began};
    }
    // If this fails the connection broke, which the watching thread's next poll will show.
    void send_beat(const Rank& to, Beat::Kind kind, int code = 0, const std::string& text = "") {
        const Beat beat = beat_of(kind, code);
        const std::lock_guard<std::mutex> lock(sending);
        if (to.watched) send_message(to.watched, std::string(reinterpret_cast<const char*>(&beat), sizeof beat) + text);
    }

    // Prints why and leaves, whatever the main thread and the GPU are doing. A process that ends also ends its kernels.
    // Rank 0 tells the others, who then leave without printing. No temporary file is made final on the way.
    [[noreturn]] void end(int code, const std::string& text) {
        static std::mutex once;
        once.lock();  // never unlocked, so that only one thread ends the process
        if (job.rank == 0)
            for (const Rank& r : ranks) send_beat(r, Beat::kFailed, code, text);
        std::fprintf(stderr, "train_gpt2cu: %s\n", text.c_str());
        _exit(code);
    }
    // Has rank 0 print what is wrong and end all ranks, including this one.
    void report(const std::string& what, int code) {
        const std::string text = title(job.rank) + ": " + what;
        if (job.rank == 0) end(code, text);
        send_beat(ranks[0], Beat::kFailed, code, text);
    }
    // The main thread waits here. The watching thread will learn why the job ends, or that rank 0 is gone, and end us.
    void await_end() const { sleep_for(patience.silence + 5); }

    void receive(int from) {
        Rank& rank = ranks[from];
        std::string text;
        Beat beat = {};
        if (recv_message(rank.watched, text) && text.size() >= sizeof beat)
            std::memcpy(&beat, text.data(), sizeof beat);
        else if (leaving)
            beat.kind = Beat::kGoodbye;
        else
            end(1, title(from) + " died: its connection closed; the job ends");
        if (beat.kind == Beat::kFailed && job.rank == 0) end(beat.code, text.substr(sizeof beat));
        if (beat.kind == Beat::kFailed) _exit(beat.code);  // rank 0 has printed why
        rank.hear(beat);
        const std::lock_guard<std::mutex> lock(sending);
        if (beat.kind == Beat::kGoodbye) rank.watched = Socket();
    }
    // Waits so long for messages, receives one from each rank that has sent any, and returns whether one is watched.
    bool receive_from_all(int milliseconds) {
        std::vector<pollfd> polls;
        for (const Rank& r : ranks) polls.push_back({r.watched.fd, POLLIN, 0});  // -1 is skipped
        poll(polls.data(), polls.size(), milliseconds);
        for (int r = 0; r < job.size; r++)
            if (polls[r].revents) receive(r);
        return std::any_of(ranks.begin(), ranks.end(), [](const Rank& r) { return bool(r.watched); });
    }

    // Rank 0 looks for a rank that runs without progress while it does not wait for others on the host. Others may
    // stand still at the same time because they wait for it on their GPUs. The ranks with the least progress are to
    // blame.
    void look_for_stalls() {
        bool found = false;
        uint64_t least = UINT64_MAX;
        for (const Rank& r : ranks) {
            found |= r.stalled(1);
            if (r.stalled(0.8)) least = std::min(least, r.last.come);
        }
        if (!found) return;
        std::string who;
        double seconds = 0;
        for (int r = 0; r < job.size; r++)
            if (ranks[r].stalled(0.8) && ranks[r].last.come == least)
                append(who, title(r)), seconds = ranks[r].last.expected;
        end(1, format("no progress for %.0f s: %s; the job ends", seconds, who.c_str()));
    }

    void watch() {
        for (Rank& r : ranks) r.heard = r.moved = now(), r.watched.set_timeout(5);
        for (double next_beat = now(); !leaving;) {
            receive_from_all(50);
            for (int r = 0; r < job.size; r++)
                if (ranks[r].watched && now() - ranks[r].heard > patience.silence)
                    end(1, format("%s hangs or cannot be reached: silent for %.0f s; the job ends", title(r).c_str(),
                                  patience.silence));
            if (now() < next_beat) continue;
            next_beat = now() + std::min(1.0, patience.silence / 4);
            for (const Rank& r : ranks) send_beat(r, Beat::kAlive);
            if (job.rank == 0) ranks[0].hear(beat_of(Beat::kAlive)), look_for_stalls();
            std::unique_lock<std::mutex> lock(checking);
            const std::string wrong = check ? check() : "";
            lock.unlock();
            if (!wrong.empty()) report(wrong, 1);
        }
        for (const Rank& r : ranks) {
            send_beat(r, Beat::kGoodbye);
            shutdown(r.watched.fd, SHUT_WR);
        }
        // If we closed a connection to which bytes still come, the other side might not get our goodbye.
        for (const double give_up = now() + 5; receive_from_all(20) && now() < give_up;) {}
    }
    void stop_watching() {
        leaving = true;
        if (watcher.joinable()) watcher.join();
    }
};

Job::Job() = default;
Job::~Job() = default;

Job::Job(const Place& place, const Patience& patience) : rank(place.rank), size(place.size) {
    if (size == 1) return;
    impl_ = std::make_unique<Impl>(*this, place, patience);
    impl_->meet();
    local_rank = local_size = 0;
    for (int r = 0; r < size; r++)
        if (impl_->ranks[r].host == impl_->ranks[rank].host) local_size++, local_rank += r < rank;
    if (place.local_rank >= 0) local_rank = place.local_rank;
    impl_->watcher = std::thread([this] { impl_->watch(); });
}

void Job::leave() {
    barrier();
    if (impl_) impl_->stop_watching();
}

void Job::fail(const std::string& what, int code) {
    impl_->report(what, code);
    impl_->await_end();
    impl_->end(code, impl_->title(rank) + ": " + what);
}

std::atomic<uint64_t>& Job::progress() {
    static std::atomic<uint64_t> count{0};
    return count;
}

void Job::also_watch(std::function<std::string()> check) {
    if (!impl_) return;
    const std::lock_guard<std::mutex> lock(impl_->checking);
    impl_->check = std::move(check);
}

// ---------------------------------------------------------------------------------------------------------------------
// Exchanging

void Job::exchange(const std::vector<Transfer>& transfers) {
    if (size == 1) return;
    if (impl_->leaving) throw Error("a rank has left its job: it cannot meet the others any more");
    struct Half {  // of a transfer
        int peer;
        short event;  // POLLOUT sends, POLLIN receives
        char* at;
        size_t left;
    };
    std::vector<Half> halves;
    for (const Transfer& t : transfers) {
        if (t.peer == rank) continue;
        halves.push_back({t.peer, POLLOUT, const_cast<char*>(static_cast<const char*>(t.send)), t.send_bytes});
        halves.push_back({t.peer, POLLIN, static_cast<char*>(t.recv), t.recv_bytes});
    }
    impl_->waiting = true;
    for (std::vector<pollfd> polls;; polls.clear()) {
        const auto is_done = [](const Half& h) { return h.left == 0; };
        halves.erase(std::remove_if(halves.begin(), halves.end(), is_done), halves.end());
        if (halves.empty()) break;
        for (const Half& h : halves) polls.push_back({impl_->ranks[h.peer].data.fd, h.event, 0});
        if (poll(polls.data(), polls.size(), -1) < 0 && errno != EINTR)
            throw Error("poll: " + std::string(std::strerror(errno)));
        for (size_t i = 0; i < halves.size(); i++) {
            if (!polls[i].revents) continue;
            Half& h = halves[i];
            const ssize_t n = h.event == POLLOUT ? send(polls[i].fd, h.at, h.left, MSG_NOSIGNAL | MSG_DONTWAIT)
                                                 : recv(polls[i].fd, h.at, h.left, MSG_DONTWAIT);
            if (n > 0) {
                h.at += n, h.left -= static_cast<size_t>(n);
            } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
                impl_->await_end();
                throw Error("lost the connection to " + impl_->title(h.peer));
            }
        }
    }
    impl_->waiting = false;
    progress()++;
}

void Job::gather_bytes(void* all, size_t bytes) {
    char* base = static_cast<char*>(all);
    std::vector<Transfer> transfers;
    for (int r = 0; r < size; r++) transfers.push_back({r, base + rank * bytes, bytes, base + r * bytes, bytes});
    exchange(transfers);
}

void Job::broadcast_bytes(void* data, size_t bytes) {
    std::vector<Transfer> transfers;
    if (rank != 0) transfers.push_back({0, nullptr, 0, data, bytes});
    for (int r = 1; rank == 0 && r < size; r++) transfers.push_back({r, data, bytes, nullptr, 0});
    exchange(transfers);
}

void Job::sum(std::vector<double>& x) {
    const size_t n = x.size();
    std::vector<double> all(size * n);
    std::copy_n(x.data(), n, all.data() + rank * n);
    gather_bytes(all.data(), n * sizeof(double));
    std::copy_n(all.data(), n, x.data());
    for (int r = 1; r < size; r++)
        for (size_t i = 0; i < n; i++) x[i] += all[r * n + i];
}

std::vector<std::string> Job::all_gather(const std::string& mine) {
    const std::vector<uint64_t> lengths = all_gather<uint64_t>(mine.size());
    std::vector<std::string> all(size, mine);
    std::vector<Transfer> transfers;
    for (int r = 0; r < size; r++) {
        all[r].resize(lengths[r]);
        transfers.push_back({r, mine.data(), mine.size(), all[r].data(), all[r].size()});
    }
    exchange(transfers);
    return all;
}

void Job::agree(const std::vector<std::pair<std::string, std::string>>& fields) {
    std::string text;
    for (const auto& [name, value] : fields) text += name + '\0' + value + '\0';
    const std::vector<std::string> all = all_gather(text);
    if (std::count(all.begin(), all.end(), all[0]) == size) return;

    const std::vector<size_t> numbers = all_gather(fields.size());
    for (int r = 1; r < size; r++)
        if (numbers[r] != numbers[0]) throw Error(impl_->title(r) + " is another program than rank 0");
    std::string differences;
    for (const auto& [name, value] : fields) {
        const std::vector<std::string> names = all_gather(name), values = all_gather(value);
        for (int r = 1; r < size; r++)
            if (names[r] != names[0] || values[r] != values[0])
                append(differences,
                       format("%s: %s has \"%s\", rank 0 has \"%s\"", names[r].c_str(), impl_->title(r).c_str(),
                              values[r].c_str(), values[0].c_str()),
                       "; ");
    }
    if (!differences.empty())
        throw Error("the ranks of a job must have the same program, arguments and data: " + differences);
}
