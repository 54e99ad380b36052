// How the ranks of a job meet, exchange and watch each other (see job.h).
//
// Every connection begins with a hello, in which a rank says who it is. Rank r > 0 first says hello to rank 0 by the
// job's name. Rank 0 answers "no" and why. Or, when all are there, it answers with the hellos of all ranks, which now
// have a random key for a name. These connections carry the beats from then on. For exchange() every rank connects to
// the ranks below it and says hello by the key, so that nothing else gets in.
//
// After the meeting only the watching thread uses the connections for beats. A beat is "alive …" with what rank 0 judges
// progress by, "failed <exit code> <why>", or "goodbye". All that ranks say to each other is lines of text.
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

void append(std::string& list, const std::string& item, const char* separator = ", ") {
    list += (list.empty() ? "" : separator) + item;
}

// What others have sent, fit to be printed.
std::string printable(std::string text) {
    for (char& c : text)
        if (c < ' ' || c > '~') c = '?';
    return text;
}

// A connection, or none if fd is -1. Connecting and sending block for at most 5 s.
struct Socket {
    int fd = -1;
    std::string part;  // of a line that is coming
    Socket() = default;
    explicit Socket(int fd) : fd(fd) {
        const int on = 1;
        const timeval limit = {5, 0};
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    }
    Socket(Socket&& other) noexcept : fd(std::exchange(other.fd, -1)), part(std::move(other.part)) {}
    Socket& operator=(Socket&& other) noexcept { return std::swap(fd, other.fd), std::swap(part, other.part), *this; }
    ~Socket() { close(fd); }
    explicit operator bool() const { return fd >= 0; }

    bool send_line(const std::string& line) const {
        const std::string bytes = line + "\n";
        return send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
    }
    // Takes what has come of a line, without waiting, and returns whether that is the whole line. What follows the line
    // stays for others to read. If the connection was closed, or the line is too long, there is none afterwards.
    bool recv_line(std::string& line) {
        for (char c;; part += c) {
            const ssize_t n = recv(fd, &c, 1, MSG_DONTWAIT);
            if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
            if (n <= 0 || part.size() > 1 << 20) return *this = Socket(), false;
            if (c == '\n') return line = std::exchange(part, ""), true;
        }
    }
};

// The address and port of one end of a connection, which `get` says: getsockname or getpeername.
std::pair<std::string, std::string> end_of(int fd, int (*get)(int, sockaddr*, socklen_t*)) {
    sockaddr_storage a = {};
    socklen_t length = sizeof a;
    char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
    get(fd, reinterpret_cast<sockaddr*>(&a), &length);
    getnameinfo(reinterpret_cast<sockaddr*>(&a), length, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    return {host, port};
}
bool is_loopback(const std::string& address) {
    return address.compare(0, 4, "127.") == 0 || address == "::1";
}
// Where a host's port may be. localhost is one address, so that rank 0 and the others mean the same.
std::unique_ptr<addrinfo, void (*)(addrinfo*)> look_up(const std::string& host, int port, int flags) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM, hints.ai_flags = flags;
    getaddrinfo(host == "localhost" ? "127.0.0.1" : host.c_str(), std::to_string(port).c_str(), &hints, &found);
    return {found, freeaddrinfo};
}

// Tries again until the deadline, because the other rank may start later than we.
Socket connect_to(const std::string& host, int port, double deadline, const std::string& whom) {
    int error = EADDRNOTAVAIL;
    for (; now() < deadline; sleep_for(0.05)) {
        const auto found = look_up(host, port, 0);
        for (const addrinfo* a = found.get(); a; a = a->ai_next) {
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

// What a rank says of itself, and what this rank knows of it besides. Rank 0 watches all, itself too but without a
// connection. The others watch rank 0.
struct Rank {
    int rank = 0, size = 0, pid = 0, port = 0;
    std::string host, address, name;  // the job's name, later the key
    Socket data;                      // for exchange()
    Socket watched;                   // for beats, until the other says goodbye
    double heard = 0, moved = 0;      // when
    std::string beat;                 // the last
    double expected = 0;  // it must make progress in this many seconds; 0 if it need not or waits for others
    uintmax_t come = 0;   // its progress since the last expect_progress()

    std::string title() const { return format("rank %d (pid %d on %s)", rank, pid, host.c_str()); }
    std::string hello() const {
        return format("gpt2job2 %d %d %d %d %s %s %s", rank, size, pid, port, host.c_str(), address.c_str(),
                      name.c_str());
    }
    bool read_hello(const std::string& line) {
        std::istringstream in(line);
        std::string protocol;
        in >> protocol >> rank >> size >> pid >> port >> host >> address;
        host = printable(host), address = printable(address);
        const bool ours = in && protocol == "gpt2job2" && rank >= 0 && rank < size;
        std::getline(in.ignore(), name);
        return ours;
    }
    bool stalled(double share) const { return expected > 0 && now() - moved > share * expected; }
};

}  // namespace

int listen_at(const std::string& address, int port) {
    auto found = look_up(address, port, AI_NUMERICHOST);
    if (!found) found = look_up("0.0.0.0", port, AI_NUMERICHOST);
    Socket s(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;  // lets us take a port whose last connections have only just closed
    setsockopt(s.fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(s.fd, found->ai_addr, found->ai_addrlen) || listen(s.fd, 1024))
        throw Error(
            format("cannot listen on port %d of %s: %s; MASTER_ADDR must be rank 0's machine and MASTER_PORT free",
                   port, address.c_str(), std::strerror(errno)));
    return std::exchange(s.fd, -1);
}
int port_of(int fd) {
    return std::stoi(end_of(fd, getsockname).second);
}
double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void sleep_for(double seconds) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}
std::string random_name() {
    std::random_device random;
    return format("%08x%08x", random(), random());
}

struct Job::Impl {
    const Place place;
    const Patience patience;
    std::vector<Rank> ranks;
    Rank& me = ranks[place.rank];
    std::string refused;  // why the last one was
    std::atomic<bool> waiting{false}, leaving{false};
    std::atomic<double> expected{0};
    std::atomic<uint64_t> began{0};                    // progress() when expect_progress() was called
    std::atomic<const std::string*> failure{nullptr};  // a beat that says why this rank fails
    std::mutex checking;
    std::vector<std::function<std::string()>> checks;
    std::thread watcher;

    Impl(const Place& place, const Patience& patience) : place(place), patience(patience), ranks(place.size) {}
    ~Impl() {
        leaving = true;
        if (watcher.joinable()) watcher.join();
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Meeting

    void meet() {
        char host[256] = "";
        gethostname(host, sizeof host - 1);
        me.name = place.job, me.host = host, me.address = "127.0.0.1";
        me.rank = place.rank, me.size = place.size, me.pid = static_cast<int>(getpid());
        const Socket listener = place.rank > 0 ? come_to_first() : gather_ranks();
        const double deadline = now() + patience.meet;
        for (int r = 0; r < place.rank; r++) {
            ranks[r].data = connect_to(ranks[r].address, ranks[r].port, deadline, ranks[r].title());
            ranks[r].data.send_line(me.hello());
        }
        accept_ranks(listener);
    }

    // Waits until all ranks above this one have said hello. Others may connect too, and say nothing or anything.
    void accept_ranks(const Socket& listener) {
        std::vector<Socket> guests;
        std::string line;
        for (const double deadline = now() + patience.meet;;) {
            std::string missing;
            for (int r = place.rank + 1; r < place.size; r++)
                if (!ranks[r].data) append(missing, std::to_string(r));
            if (missing.empty()) return;
            if (now() >= deadline)
                throw Error(format("of %d ranks these did not come to port %d in %.0f s: %s; look at their output%s",
                                   place.size, me.port, patience.meet, missing.c_str(), refused.c_str()));
            std::vector<pollfd> polls = {{listener.fd, POLLIN, 0}};
            for (const Socket& guest : guests) polls.push_back({guest.fd, POLLIN, 0});
            poll(polls.data(), polls.size(), 100);
            for (Socket& guest : guests)
                if (guest.recv_line(line)) welcome(std::move(guest), line);
            const auto is_gone = [](const Socket& guest) { return !guest; };
            guests.erase(std::remove_if(guests.begin(), guests.end(), is_gone), guests.end());
            if (polls[0].revents) guests.emplace_back(accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC));
            if (guests.size() > ranks.size() + 256 || (!guests.empty() && !guests.back())) guests.erase(guests.begin());
            // A rank that goes before all are there may come again.
            for (Rank& r : ranks)
                if (r.data && me.name == place.job) r.data.recv_line(line);
        }
    }

    // Keeps the connection of a rank that has said hello, or refuses it. The reason tells nothing that lets others in.
    void welcome(Socket connection, const std::string& line) {
        Rank guest;
        std::string why;
        if (!guest.read_hello(line)) return;  // not one of us
        if (guest.name != me.name)
            why = "this rank is not of the job that meets here; set another MASTER_PORT, or one GPT2_JOB for all ranks";
        else if (guest.size != place.size)
            why = format("%s was started as one of %d ranks, rank 0 as one of %d; start all with the same number",
                         guest.title().c_str(), guest.size, place.size);
        else if (guest.rank <= place.rank || ranks[guest.rank].data)
            why = format("%s has come already, now %s; two processes have the same rank, or an earlier job waits",
                         ranks[guest.rank].title().c_str(), guest.title().c_str());
        if (!why.empty()) return refused = ", and refused: " + why, void(connection.send_line("no " + why));
        guest.address = end_of(connection.fd, getpeername).first;
        guest.data = std::move(connection);
        guest.watched = std::move(ranks[guest.rank].watched);
        ranks[guest.rank] = std::move(guest);
    }

    // On rank 0, which sends everybody's hello to all.
    Socket gather_ranks() {
        Socket listener(place.listen_fd >= 0 ? place.listen_fd : listen_at(place.address, place.port));
        me.port = port_of(listener.fd);
        accept_ranks(listener);
        const std::string key = random_name();
        std::string table;
        for (Rank& r : ranks) r.name = key, append(table, r.hello(), "\n");
        for (Rank& r : ranks) r.data.send_line(table), r.watched = std::move(r.data);
        return listener;
    }

    // On the others.
    Socket come_to_first() {
        const std::string where = format("%s port %d", place.address.c_str(), place.port);
        Socket s = connect_to(place.address, place.port, now() + patience.meet, "rank 0");
        // Others reach this rank as rank 0 does. A loopback address is that of rank 0's machine, which they reach by
        // MASTER_ADDR.
        const std::string here = end_of(s.fd, getsockname).first;
        Socket listener(listen_at(is_loopback(here) ? place.address : here, 0));
        me.port = port_of(listener.fd);
        s.send_line(me.hello());
        const double give_up = now() + patience.meet + 5;  // so late, because rank 0 waits for `meet`
        for (Rank& r : ranks) {
            std::string answer;
            for (pollfd p = {s.fd, POLLIN, 0}; s && !s.recv_line(answer) && now() < give_up;) poll(&p, 1, 100);
            if (!r.read_hello(answer))
                throw Error(where + (answer.compare(0, 3, "no ") == 0
                                         ? ": refused by rank 0: " + printable(answer.substr(3))
                                         : ": what answers is not rank 0 of this job, or it has failed; "
                                           "see rank 0's output, or set another MASTER_PORT"));
            if (is_loopback(r.address)) r.address = place.address;
        }
        ranks[0].watched = std::move(s);
        return listener;
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Watching and ending, by the watching thread

    std::string failed(int code, const std::string& what) const {
        std::string line = format("failed %d %s: %s", code, me.title().c_str(), what.c_str());
        std::replace(line.begin(), line.end(), '\n', ' ');
        return line;
    }
    // One like the last shows no progress.
    std::string beat() {
        const std::lock_guard<std::mutex> lock(checking);
        std::string wrong;
        for (const auto& check : checks) wrong = wrong.empty() ? check() : wrong;
        if (failure) return *failure;
        if (!wrong.empty()) return failed(1, wrong);
        const uintmax_t at_begin = began, so_far = progress();
        return format("alive %g %ju %ju", waiting || leaving ? 0 : expected.load(), so_far - at_begin, so_far);
    }
    // If this fails the connection broke, which the next poll will show.
    void tell_all(const std::string& line) const {
        for (const Rank& r : ranks)
            if (r.watched) r.watched.send_line(line);
    }
    void hear(Rank& from, const std::string& line) {
        int code = 1, length = 0;
        if (std::sscanf(line.c_str(), "failed %d %n", &code, &length) > 0) {
            if (place.rank > 0) _exit(code);  // rank 0 has printed why
            end(code, line.substr(length));
        }
        from.heard = now(), from.expected = 0;
        std::sscanf(line.c_str(), "alive %lf %ju", &from.expected, &from.come);
        if (from.expected == 0 || line != from.beat) from.moved = from.heard;
        from.beat = line;
        if (line == "goodbye") from.watched = Socket();
    }

    // Prints why and leaves, whatever the main thread and the GPU are doing. A process that ends also ends its kernels.
    // Rank 0 tells the others, who then leave without printing. No temporary file is made final on the way.
    [[noreturn]] void end(int code, const std::string& why) const {
        if (place.rank == 0) tell_all(format("failed %d", code));
        std::fprintf(stderr, "train_gpt2cu: %s\n", why.c_str());
        _exit(code);
    }
    // The main thread waits here. The watching thread will learn why the job ends, or that rank 0 is gone, and end us.
    void await_end() const { sleep_for(patience.silence + 5); }

    // Waits a moment for lines, takes one from each rank that has sent any, and returns whether one is watched.
    bool hear_all() {
        std::vector<pollfd> polls;
        for (const Rank& r : ranks) polls.push_back({r.watched.fd, POLLIN, 0});  // -1 is skipped
        poll(polls.data(), polls.size(), 20);
        for (Rank& r : ranks) {
            std::string line;
            if (!r.watched) continue;
            if (r.watched.recv_line(line))
                hear(r, line);
            else if (!r.watched && !leaving)
                end(1, r.title() + " died: its connection closed; the job ends");
        }
        return std::any_of(ranks.begin(), ranks.end(), [](const Rank& r) { return bool(r.watched); });
    }

    // Rank 0 looks for a rank that runs without progress while it does not wait for others on the host. Others may
    // stand still at the same time because they wait for it on their GPUs. The ranks with the least progress are to
    // blame.
    void look_for_stalls() {
        bool found = false;
        uintmax_t least = UINTMAX_MAX;
        for (const Rank& r : ranks) {
            found |= r.stalled(1);
            if (r.stalled(0.8)) least = std::min(least, r.come);
        }
        if (!found) return;
        std::string who;
        double seconds = 0;
        for (const Rank& r : ranks)
            if (r.stalled(0.8) && r.come == least) append(who, r.title()), seconds = r.expected;
        end(1, format("no progress for %.0f s: %s; the job ends", seconds, who.c_str()));
    }

    void watch() {
        for (Rank& r : ranks) r.heard = r.moved = now();
        for (double next_beat = now(); !leaving;) {
            hear_all();
            for (const Rank& r : ranks)
                if (r.watched && now() - r.heard > patience.silence)
                    end(1, format("%s hangs or cannot be reached: silent for %.0f s; the job ends", r.title().c_str(),
                                  patience.silence));
            if (now() < next_beat && !failure) continue;
            next_beat = now() + std::min(1.0, patience.silence / 4);
            const std::string mine = beat();
            tell_all(mine);
            if (place.rank == 0) hear(me, mine), look_for_stalls();
        }
        tell_all("goodbye");
        for (const Rank& r : ranks) shutdown(r.watched.fd, SHUT_WR);
        // If we closed a connection to which bytes still come, the other side might not get our goodbye.
        for (const double give_up = now() + 5; hear_all() && now() < give_up;) {}
    }
};

Job::Job() = default;
Job::~Job() = default;

Job::Job(const Place& place, const Patience& patience) : rank(place.rank), size(place.size) {
    if (size == 1) return;
    impl_ = std::make_unique<Impl>(place, patience);
    impl_->meet();
    local_rank = local_size = 0;
    for (const Rank& r : impl_->ranks)
        if (r.host == impl_->me.host) local_size++, local_rank += r.rank < rank;
    if (place.local_rank >= 0) local_rank = place.local_rank;
    impl_->watcher = std::thread([impl = impl_.get()] { impl->watch(); });
}

void Job::leave() {
    barrier();
    impl_.reset();
}

void Job::fail(const std::exception& e) {
    const int code = exit_code_of(e);
    const std::string line = impl_->failed(code, e.what());
    impl_->failure = &line;
    impl_->await_end();
    impl_->end(code, impl_->me.title() + ": " + e.what());
}

void Job::expect_progress(double seconds) {
    if (!impl_) return;
    impl_->began = progress().load();
    impl_->expected = seconds;
}

std::atomic<uint64_t>& Job::progress() {
    static std::atomic<uint64_t> count{0};
    return count;
}

void Job::also_watch(std::function<std::string()> check) {
    if (!impl_) return;
    const std::lock_guard<std::mutex> lock(impl_->checking);
    check ? impl_->checks.push_back(std::move(check)) : impl_->checks.pop_back();
}

// ---------------------------------------------------------------------------------------------------------------------
// Exchanging

void Job::exchange(std::vector<Transfer> transfers) {
    if (size == 1) return;
    if (!impl_) throw Error("a rank has left its job: it cannot meet the others any more");
    impl_->waiting = true;
    for (std::vector<pollfd> polls;; polls.clear()) {
        const auto is_done = [&](const Transfer& t) { return t.bytes == 0 || t.peer == rank; };
        transfers.erase(std::remove_if(transfers.begin(), transfers.end(), is_done), transfers.end());
        if (transfers.empty()) break;
        for (const Transfer& t : transfers)
            polls.push_back({impl_->ranks[t.peer].data.fd, short(t.sends ? POLLOUT : POLLIN), 0});
        if (poll(polls.data(), polls.size(), -1) < 0 && errno != EINTR)
            throw Error("poll: " + std::string(std::strerror(errno)));
        for (size_t i = 0; i < transfers.size(); i++) {
            if (!polls[i].revents) continue;
            Transfer& t = transfers[i];
            const ssize_t n = t.sends ? send(polls[i].fd, t.at, t.bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                                      : recv(polls[i].fd, t.at, t.bytes, MSG_DONTWAIT);
            if (n > 0) {
                t.at += n, t.bytes -= static_cast<size_t>(n);
            } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
                impl_->await_end();
                throw Error("lost the connection to " + impl_->ranks[t.peer].title());
            }
        }
    }
    impl_->waiting = false;
    progress()++;
}

void Job::gather_bytes(void* all, size_t bytes, int first, int count) {
    char* const base = static_cast<char*>(all);
    std::vector<Transfer> transfers;
    for (int r = 0; r < count; r++) {
        transfers.push_back(Transfer::to(first + r, base + (rank - first) * bytes, bytes));
        transfers.push_back(Transfer::from(first + r, base + r * bytes, bytes));
    }
    exchange(transfers);
}

void Job::broadcast(void* data, size_t bytes) {
    std::vector<Transfer> transfers;
    for (int r = 1; rank == 0 && r < size; r++) transfers.push_back(Transfer::to(r, data, bytes));
    if (rank > 0) transfers.push_back(Transfer::from(0, data, bytes));
    exchange(transfers);
}

std::vector<std::string> Job::all_gather(const std::string& mine) {
    const std::vector<uint64_t> lengths = all_gather<uint64_t>(mine.size());
    std::vector<std::string> all(size, mine);
    std::vector<Transfer> transfers;
    for (int r = 0; r < size; r++) {
        all[r].resize(lengths[r]);
        transfers.push_back(Transfer::to(r, mine.data(), mine.size()));
        transfers.push_back(Transfer::from(r, all[r].data(), all[r].size()));
    }
    exchange(transfers);
    return all;
}

void Job::agree(const Fields& fields) {
    const std::vector<size_t> numbers = all_gather(fields.size());
    for (int r = 1; r < size; r++)
        if (numbers[r] != numbers[0]) throw Error(impl_->ranks[r].title() + " is another program than rank 0");
    std::string differences;
    for (const auto& [name, value] : fields) {
        const std::vector<std::string> names = all_gather(name), values = all_gather(value);
        for (int r = 1; r < size; r++)
            if (names[r] != names[0] || values[r] != values[0])
                append(differences,
                       format("%s: %s has \"%s\", rank 0 has \"%s\"", names[r].c_str(), impl_->ranks[r].title().c_str(),
                              values[r].c_str(), values[0].c_str()),
                       "; ");
    }
    if (!differences.empty())
        throw Error("the ranks of a job must have the same program, arguments and data: " + differences);
}
