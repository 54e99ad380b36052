// How the ranks of a job meet, exchange and watch each other (see job.h).
//
// Messages of the meeting are text behind a magic and a length. Rank r > 0 sends rank 0 a hello with its job, rank,
// size, host, pid and the port where it listens itself. Rank 0 answers "no" and why. Or, when all are there, it answers
// "yes", a random key and the table of all ranks. Then r connects once more to rank 0, for the beats, and to ranks
// 1..r-1. Each of these connections starts with the key, so that nothing from outside the job gets in.
#include "layers/comm/job.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

Deadline in_seconds(double s) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}
double seconds_since(Clock::time_point t) {
    return std::chrono::duration<double>(Clock::now() - t).count();
}
void nap() {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

// ---------------------------------------------------------------------------------------------------------------------
// Sockets: they never block, and every wait has an end

struct Socket {
    int fd = -1;
    Socket() = default;
    explicit Socket(int fd) : fd(fd) {}
    Socket(Socket&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(fd, other.fd);
        return *this;
    }
    ~Socket() {
        if (fd >= 0) close(fd);
    }
    explicit operator bool() const { return fd >= 0; }
};

bool wait_for(int fd, short events, Deadline deadline) {
    for (;;) {
        const double left = -seconds_since(deadline);
        if (left <= 0) return false;
        pollfd p = {fd, events, 0};
        const int n = poll(&p, 1, static_cast<int>(std::min(left, 1000.0) * 1e3) + 1);
        if (n > 0) return true;
        if (n < 0 && errno != EINTR) return false;
    }
}

bool send_all(const Socket& s, const void* data, size_t bytes, Deadline deadline) {
    for (const char* p = static_cast<const char*>(data); bytes;) {
        const ssize_t n = send(s.fd, p, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) p += n, bytes -= static_cast<size_t>(n);
        if (n < 0 && errno != EINTR && errno != EAGAIN) return false;
        if (n < 0 && errno == EAGAIN && !wait_for(s.fd, POLLOUT, deadline)) return false;
    }
    return true;
}
bool recv_all(const Socket& s, void* data, size_t bytes, Deadline deadline) {
    for (char* p = static_cast<char*>(data); bytes;) {
        const ssize_t n = recv(s.fd, p, bytes, MSG_DONTWAIT);
        if (n == 0) return false;
        if (n > 0) p += n, bytes -= static_cast<size_t>(n);
        if (n < 0 && errno != EINTR && errno != EAGAIN) return false;
        if (n < 0 && errno == EAGAIN && !wait_for(s.fd, POLLIN, deadline)) return false;
    }
    return true;
}

constexpr char kMagic[9] = "gpt2job1";
constexpr uint32_t kLongestMessage = 1 << 20;

bool send_message(const Socket& s, const std::string& body, Deadline deadline) {
    const uint32_t length = static_cast<uint32_t>(body.size());
    std::string bytes(kMagic, 8);
    bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
    bytes += body;
    return send_all(s, bytes.data(), bytes.size(), deadline);
}
bool recv_message(const Socket& s, std::string* body, Deadline deadline) {
    char magic[8];
    uint32_t length;
    if (!recv_all(s, magic, 8, deadline) || std::memcmp(magic, kMagic, 8)) return false;
    if (!recv_all(s, &length, sizeof length, deadline) || length > kLongestMessage) return false;
    body->resize(length);
    return recv_all(s, body->data(), length, deadline);
}
std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

void no_delay(const Socket& s) {
    const int on = 1;
    setsockopt(s.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// The addresses of a host, or none if its name is unknown.
struct Address {
    sockaddr_storage bytes;
    socklen_t length;
};
std::vector<Address> addresses_of(const std::string& host, int port) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    std::vector<Address> addresses;
    if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found)) return addresses;
    for (const addrinfo* a = found; a; a = a->ai_next) {
        addresses.push_back({{}, a->ai_addrlen});
        std::memcpy(&addresses.back().bytes, a->ai_addr, a->ai_addrlen);
    }
    freeaddrinfo(found);
    return addresses;
}

Socket connect_once(const Address& to, Deadline deadline, int* error) {
    Socket s(socket(to.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    *error = errno;
    if (!s) return {};
    if (connect(s.fd, reinterpret_cast<const sockaddr*>(&to.bytes), to.length) && errno != EINPROGRESS)
        return *error = errno, Socket();
    if (!wait_for(s.fd, POLLOUT, deadline)) return *error = ETIMEDOUT, Socket();
    socklen_t length = sizeof *error;
    getsockopt(s.fd, SOL_SOCKET, SO_ERROR, error, &length);
    // While nobody listens on the port, this socket may connect to itself. It would then hold the port that rank 0
    // wants to listen on.
    sockaddr_storage us = {}, them = {};
    socklen_t our_length = sizeof us, their_length = sizeof them;
    getsockname(s.fd, reinterpret_cast<sockaddr*>(&us), &our_length);
    getpeername(s.fd, reinterpret_cast<sockaddr*>(&them), &their_length);
    if (*error == 0 && !std::memcmp(&us, &them, sizeof us)) *error = ECONNREFUSED;
    if (*error) return {};
    no_delay(s);
    return s;
}

// Tries again until the deadline, because the other rank may start later than we.
Socket connect_to(const std::string& host, int port, Deadline deadline, const std::string& whom) {
    int error = 0;
    for (; Clock::now() < deadline; nap()) {
        const std::vector<Address> addresses = addresses_of(host, port);
        if (addresses.empty()) error = EADDRNOTAVAIL;
        for (const Address& a : addresses)
            if (Socket s = connect_once(a, deadline, &error)) return s;
    }
    throw Error(format("cannot reach %s at %s port %d: %s; is it running, and are MASTER_ADDR and MASTER_PORT right?",
                       whom.c_str(), host.c_str(), port, std::strerror(error)));
}

int port_of(const Socket& s) {
    sockaddr_storage a = {};
    socklen_t length = sizeof a;
    getsockname(s.fd, reinterpret_cast<sockaddr*>(&a), &length);
    return ntohs(a.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(a).sin6_port
                                         : reinterpret_cast<sockaddr_in&>(a).sin_port);
}

// Port 0 means any that is free. If the others will connect over loopback it listens on that interface alone. IPv4.
Socket listen_at(const std::string& address, int port) {
    const bool loopback = address == "localhost" || address == "127.0.0.1";
    Socket s(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;  // lets us take a port whose last connections have only just closed
    setsockopt(s.fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in a = {};
    a.sin_family = AF_INET;
    a.sin_port = htons(static_cast<uint16_t>(port));
    a.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
    if (bind(s.fd, reinterpret_cast<sockaddr*>(&a), sizeof a) || listen(s.fd, 1024))
        throw Error(format("cannot listen on port %d: %s%s", port, std::strerror(errno),
                           port ? "; another job or program may have it: set another MASTER_PORT" : ""));
    return s;
}

// The next connection, and the address that it came from.
Socket accept_from(const Socket& listener, Deadline deadline, std::string* from) {
    while (wait_for(listener.fd, POLLIN, deadline)) {
        sockaddr_storage a = {};
        socklen_t length = sizeof a;
        Socket s(accept4(listener.fd, reinterpret_cast<sockaddr*>(&a), &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!s) continue;
        char host[NI_MAXHOST] = "";
        getnameinfo(reinterpret_cast<sockaddr*>(&a), length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
        *from = host;
        no_delay(s);
        return s;
    }
    return {};
}

uint64_t random_key() {
    uint64_t key = 0;
    while (getrandom(&key, sizeof key, 0) != sizeof key) {}
    return key;
}

std::string host_name() {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    return name;
}

constexpr char kSameAsFirst[] = "-";  // stands for rank 0's address
struct Peer {
    std::string host, address;
    int pid = 0, port = 0;
};

// What the watching threads send each other. The text of a failure follows it.
struct Beat {
    enum Kind : int32_t { kAlive, kFailed, kGoodbye };
    int32_t kind, rank;
    int32_t code;       // exit code of a failure
    double expected;    // the main thread must make progress in this many seconds; 0 if it need not or waits for others
    uint64_t progress;  // of this process
    uint64_t come;      // progress since the last expect_progress()
    uint64_t text_bytes;
};

// What rank 0 knows of each rank, itself included.
struct Pulse {
    Clock::time_point heard = Clock::now(), moved = heard;
    double expected = 0;
    uint64_t progress = 0, come = 0;
    bool gone = false;  // said goodbye

    void update(const Beat& beat) {
        heard = Clock::now();
        if (beat.expected == 0 || beat.expected != expected || beat.progress != progress) moved = heard;
        expected = beat.expected, progress = beat.progress, come = beat.come;
    }
    bool stalled(double share = 1) const { return !gone && expected > 0 && seconds_since(moved) > share * expected; }
};

}  // namespace

// =====================================================================================================================
// The job

struct Job::Impl {
    Job& job;
    const Patience patience;
    std::vector<Peer> peers;    // by rank
    std::vector<Socket> data;   // by rank, for exchange()
    std::vector<Socket> beats;  // on rank 0 one for each rank, elsewhere only the one to rank 0
    std::vector<Pulse> pulses;  // on rank 0 one for each rank, elsewhere only rank 0's
    std::atomic<bool> waiting{false}, leaving{false};
    std::mutex sending, checking;
    std::function<std::string()> check;
    std::thread watcher;

    explicit Impl(Job& job, const Patience& patience) : job(job), patience(patience) {}

    Beat beat_of(Beat::Kind kind, int rank, int code, size_t text_bytes) const {
        const uint64_t began = job.began_, now = progress();
        return {kind, rank, code, waiting ? 0 : job.expected_.load(), now, now - began, text_bytes};
    }
    std::string title(int rank) const {
        const Peer& p = peers[rank];
        return format("rank %d (pid %d on %s)", rank, p.pid, p.host.c_str());
    }
    void meet_as_first(const Place& place);
    void meet_as_other(const Place& place);
    void welcome(Socket connection, const std::string& from, const Place& place, std::vector<Socket>& links);

    void watch();
    void listen_to(int from);
    void look_for_stalls();
    bool send_beat(const Socket& to, Beat::Kind kind, int rank, int code, const std::string& text);
    void report(const std::string& what, int code);
    void await_end();
    [[noreturn]] void end(int rank, int code, const std::string& text);
    [[noreturn]] void lost(int peer);
};

Job::Job() = default;

Job::Job(const Place& place, const Patience& patience) : rank(place.rank), size(place.size) {
    if (size == 1) return;
    impl_ = std::make_unique<Impl>(*this, patience);
    Impl& m = *impl_;
    m.data.resize(size);
    if (rank == 0)
        m.meet_as_first(place);
    else
        m.meet_as_other(place);

    local_rank = local_size = 0;
    for (int r = 0; r < size; r++)
        if (m.peers[r].host == m.peers[rank].host) local_size++, local_rank += r < rank;
    if (place.local_rank >= 0) local_rank = place.local_rank;
    m.pulses.resize(m.beats.size());
    m.watcher = std::thread([&m] { m.watch(); });
}

Job::~Job() {
    if (!impl_) return;
    impl_->leaving = true;
    if (impl_->watcher.joinable()) impl_->watcher.join();
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
// Meeting

// Receives a hello and puts the connection into `links`, or refuses it with the reason. If the refused rank names this
// very job, the job fails as well.
void Job::Impl::welcome(Socket connection, const std::string& from, const Place& place, std::vector<Socket>& links) {
    std::string hello;
    if (!recv_message(connection, &hello, in_seconds(5))) return;  // not one of us
    const std::vector<std::string> fields = lines_of(hello);
    if (fields.size() != 6) return;
    const int r = std::atoi(fields[1].c_str()), n = std::atoi(fields[2].c_str());
    const std::string who = format("rank %d (pid %s on %s)", r, fields[4].c_str(), fields[3].c_str());
    std::string refusal;
    const bool stranger = fields[0] != place.job;
    if (stranger)
        refusal = format("port %d is that of another job (\"%s\", this one is \"%s\"): set another MASTER_PORT",
                         place.port, place.job.c_str(), fields[0].c_str());
    else if (n != place.size)
        refusal = format("%s was started as one of %d ranks, rank 0 as one of %d: start all with the same number",
                         who.c_str(), n, place.size);
    else if (r < 1 || r >= n || links[r])
        refusal = format("%s has come already, now %s: two processes have the same rank, or an earlier job still waits",
                         r >= 1 && r < n ? title(r).c_str() : "rank 0", who.c_str());
    if (!refusal.empty()) {
        send_message(connection, "no\n" + refusal, in_seconds(5));
        if (!stranger) throw Error(refusal);
        return;
    }
    // A loopback address is useless to ranks on other machines. They reach this one by MASTER_ADDR.
    const bool local = from.compare(0, 4, "127.") == 0 || from == "::1";
    peers[r] = {fields[3], local ? kSameAsFirst : from, std::atoi(fields[4].c_str()), std::atoi(fields[5].c_str())};
    links[r] = std::move(connection);
}

void Job::Impl::meet_as_first(const Place& place) {
    Deadline deadline = in_seconds(patience.meet);
    const Socket listener = place.listen_fd >= 0 ? Socket(place.listen_fd) : listen_at(place.address, place.port);
    peers.resize(place.size);
    peers[0] = {host_name(), kSameAsFirst, static_cast<int>(getpid()), place.port};
    const auto missing = [&](const std::vector<Socket>& links) {
        std::string ranks;
        for (int r = 1; r < place.size; r++)
            if (!links[r]) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
        return ranks;
    };
    while (!missing(data).empty()) {
        std::string from;
        Socket s = accept_from(listener, deadline, &from);
        if (!s)
            throw Error(format("of %d ranks these did not come to port %d in %.0f s: %s; look at their output",
                               place.size, place.port, patience.meet, missing(data).c_str()));
        welcome(std::move(s), from, place, data);
    }
    const std::string key = format("%016llx", static_cast<unsigned long long>(random_key()));
    std::string table = "yes\n" + key + "\n";
    for (const Peer& p : peers) table += format("%s %s %d %d\n", p.host.c_str(), p.address.c_str(), p.pid, p.port);
    for (int r = 1; r < place.size; r++) send_message(data[r], table, in_seconds(5));

    deadline = in_seconds(patience.meet);  // the ranks are there, now they connect to each other
    beats.resize(place.size);
    while (!missing(beats).empty()) {
        std::string from, text;
        Socket s = accept_from(listener, deadline, &from);
        if (!s) throw Error("lost before the first step: rank " + missing(beats) + "; look at its output");
        if (!recv_message(s, &text, in_seconds(5))) continue;
        const std::vector<std::string> fields = lines_of(text);
        const int r = fields.size() == 2 && fields[0] == key ? std::atoi(fields[1].c_str()) : 0;
        if (r >= 1 && r < place.size) beats[r] = std::move(s);
    }
}

void Job::Impl::meet_as_other(const Place& place) {
    Deadline deadline = in_seconds(patience.meet);
    const Socket listener = listen_at(place.address, 0);
    data[0] = connect_to(place.address, place.port, deadline, "rank 0");
    const std::string hello = format("%s\n%d\n%d\n%s\n%d\n%d\n", place.job.c_str(), place.rank, place.size,
                                     host_name().c_str(), static_cast<int>(getpid()), port_of(listener));
    std::string answer;
    const std::string where = format("%s port %d", place.address.c_str(), place.port);
    // Rank 0 waits `meet` seconds and then prints who did not come. We wait a little longer, so that it can.
    if (!send_message(data[0], hello, deadline) || !recv_message(data[0], &answer, in_seconds(patience.meet + 5)))
        throw Error(where +
                    ": what answers is not rank 0 of this job, or it has failed: see rank 0's output, or set "
                    "another MASTER_PORT");
    std::vector<std::string> lines = lines_of(answer);
    if (lines.size() == 2 && lines[0] == "no") throw Error(where + ": refused by rank 0: " + lines[1]);
    if (lines.size() != 2 + size_t(place.size)) throw Error(where + ": an answer that makes no sense");
    const std::string key = lines[1];
    for (int r = 0; r < place.size; r++) {
        std::istringstream line(lines[2 + r]);
        Peer p;
        line >> p.host >> p.address >> p.pid >> p.port;
        if (p.address == kSameAsFirst) p.address = place.address;
        peers.push_back(p);
    }

    deadline = in_seconds(patience.meet);  // starts anew, because only now all ranks are there
    const std::string introduction = key + "\n" + std::to_string(place.rank);
    beats.push_back(connect_to(place.address, place.port, deadline, title(0)));
    send_message(beats[0], introduction, deadline);
    for (int r = 1; r < place.rank; r++) {
        data[r] = connect_to(peers[r].address, peers[r].port, deadline, title(r));
        send_message(data[r], introduction, deadline);
    }
    for (int left = place.size - 1 - place.rank; left > 0;) {
        std::string from, text;
        Socket s = accept_from(listener, deadline, &from);
        if (!s) throw Error(format("%d ranks did not connect to rank %d; look at their output", left, place.rank));
        if (!recv_message(s, &text, in_seconds(5))) continue;
        const std::vector<std::string> fields = lines_of(text);
        const int r = fields.size() == 2 && fields[0] == key ? std::atoi(fields[1].c_str()) : 0;
        if (r > place.rank && r < place.size && !data[r]) data[r] = std::move(s), left--;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Exchanging

void Job::exchange(const std::vector<Transfer>& transfers) {
    if (size == 1) return;
    if (impl_->leaving) throw Error("a rank has left its job: it cannot meet the others any more");
    struct Open {
        const Transfer* t;
        size_t sent, received;
    };
    std::vector<Open> open;
    for (const Transfer& t : transfers) open.push_back({&t, 0, 0});
    impl_->waiting = true;
    std::vector<pollfd> polls;
    for (;;) {
        open.erase(
            std::remove_if(open.begin(), open.end(),
                           [](const Open& o) { return o.sent == o.t->send_bytes && o.received == o.t->recv_bytes; }),
            open.end());
        if (open.empty()) break;
        polls.clear();
        for (const Open& o : open)
            polls.push_back({impl_->data[o.t->peer].fd,
                             static_cast<short>((o.sent < o.t->send_bytes ? POLLOUT : 0) |
                                                (o.received < o.t->recv_bytes ? POLLIN : 0)),
                             0});
        if (poll(polls.data(), polls.size(), -1) < 0 && errno != EINTR)
            throw Error("poll: " + std::string(std::strerror(errno)));
        for (size_t i = 0; i < open.size(); i++) {
            Open& o = open[i];
            const int fd = polls[i].fd;
            if (polls[i].revents & POLLOUT) {
                const ssize_t n = send(fd, static_cast<const char*>(o.t->send) + o.sent, o.t->send_bytes - o.sent,
                                       MSG_NOSIGNAL | MSG_DONTWAIT);
                if (n < 0 && errno != EAGAIN && errno != EINTR) impl_->lost(o.t->peer);
                if (n > 0) o.sent += static_cast<size_t>(n);
            }
            if (polls[i].revents & (POLLIN | POLLERR | POLLHUP)) {
                if (o.received == o.t->recv_bytes) {  // we only send; an error means that the connection broke
                    if (polls[i].revents & POLLERR) impl_->lost(o.t->peer);
                    continue;
                }
                const ssize_t n =
                    recv(fd, static_cast<char*>(o.t->recv) + o.received, o.t->recv_bytes - o.received, MSG_DONTWAIT);
                if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) impl_->lost(o.t->peer);
                if (n > 0) o.received += static_cast<size_t>(n);
            }
        }
    }
    impl_->waiting = false;
    progress()++;
}

void Job::gather_bytes(void* all, size_t bytes) {
    char* base = static_cast<char*>(all);
    std::vector<Transfer> transfers;
    for (int r = 0; r < size; r++)
        if (r != rank) transfers.push_back({r, base + rank * bytes, bytes, base + r * bytes, bytes});
    exchange(transfers);
}

void Job::broadcast_bytes(void* data, size_t bytes) {
    std::vector<Transfer> transfers;
    if (rank != 0) transfers.push_back({0, nullptr, 0, data, bytes});
    for (int r = 1; rank == 0 && r < size; r++) transfers.push_back({r, data, bytes, nullptr, 0});
    exchange(transfers);
}

void Job::sum(std::vector<double>& x) {
    if (size == 1) return;
    const size_t n = x.size();
    std::vector<double> all(size * n);
    std::copy_n(x.data(), n, all.data() + rank * n);
    gather_bytes(all.data(), n * sizeof(double));
    std::fill(x.begin(), x.end(), 0.0);
    for (int r = 0; r < size; r++)
        for (size_t i = 0; i < n; i++) x[i] += all[r * n + i];
}

std::vector<std::string> Job::all_gather(const std::string& mine) {
    const std::vector<uint64_t> lengths = all_gather<uint64_t>(mine.size());
    std::vector<std::string> all(size, mine);
    std::vector<Transfer> transfers;
    for (int r = 0; r < size; r++) {
        if (r == rank) continue;
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
    const auto split = [](const std::string& s) {
        std::vector<std::string> parts;
        for (size_t at = 0, end; (end = s.find('\0', at)) != std::string::npos; at = end + 1)
            parts.push_back(s.substr(at, end - at));
        return parts;
    };
    const std::vector<std::string> first = split(all[0]);
    std::string differences;
    for (int r = 1; r < size; r++) {
        const std::vector<std::string> other = split(all[r]);
        if (other.size() != first.size()) throw Error(impl_->title(r) + " is another program than rank 0");
        for (size_t i = 0; i < first.size(); i += 2)
            if (first[i] != other[i] || first[i + 1] != other[i + 1])
                differences +=
                    format("%s%s: %s has \"%s\", rank 0 has \"%s\"", differences.empty() ? "" : "; ", other[i].c_str(),
                           impl_->title(r).c_str(), other[i + 1].c_str(), first[i + 1].c_str());
    }
    if (!differences.empty())
        throw Error("the ranks of a job must have the same program, arguments and data: " + differences);
}

// ---------------------------------------------------------------------------------------------------------------------
// Watching and ending

bool Job::Impl::send_beat(const Socket& to, Beat::Kind kind, int rank, int code, const std::string& text) {
    const Beat beat = beat_of(kind, rank, code, text.size());
    std::string bytes(reinterpret_cast<const char*>(&beat), sizeof beat);
    bytes += text;
    const std::lock_guard<std::mutex> lock(sending);
    return send_all(to, bytes.data(), bytes.size(), in_seconds(1));
}

// Prints why and leaves, whatever the main thread and the GPU are doing. A process that ends also ends its kernels.
// Rank 0 tells the others, who then leave without printing. No temporary file is made final on the way.
void Job::Impl::end(int rank, int code, const std::string& text) {
    static std::mutex once;
    once.lock();  // never unlocked, so that only one thread ends the process
    if (job.rank == 0)
        for (int r = 1; r < job.size; r++) send_beat(beats[r], Beat::kFailed, rank, code, text);
    std::fprintf(stderr, "train_gpt2cu: %s\n", text.c_str());
    _exit(code);
}

// A connection broke.
void Job::Impl::lost(int peer) {
    await_end();
    throw Error("lost the connection to " + title(peer));
}

void Job::fail(const std::string& what, int code) {
    impl_->report(what, code);
    impl_->await_end();
    impl_->end(rank, code, impl_->title(rank) + ": " + what);
}

// Has rank 0 print what is wrong and end all ranks, including this one.
void Job::Impl::report(const std::string& what, int code) {
    const std::string text = title(job.rank) + ": " + what;
    if (job.rank == 0) end(0, code, text);
    send_beat(beats[0], Beat::kFailed, job.rank, code, text);
}

// The main thread waits here. The watching thread will learn why the job ends, or that rank 0 is gone, and end us.
void Job::Impl::await_end() {
    std::this_thread::sleep_for(std::chrono::duration<double>(patience.silence + 5));
}

void Job::Impl::listen_to(int from) {
    const Socket& s = beats[from];
    Beat beat;
    if (!recv_all(s, &beat, sizeof beat, in_seconds(5)) || beat.text_bytes > kLongestMessage) {
        if (leaving) return void(pulses[from].gone = true);
        end(from, 1, title(from) + " died: its connection closed; the job ends");
    }
    std::string text(beat.text_bytes, '\0');
    recv_all(s, text.data(), text.size(), in_seconds(5));
    if (beat.kind == Beat::kGoodbye) pulses[from].gone = true;
    if (beat.kind == Beat::kFailed) {
        if (job.rank == 0) end(beat.rank, beat.code, text);
        _exit(beat.code);  // rank 0 has printed why
    }
    pulses[from].update(beat);
}

// Rank 0 looks for a rank that runs without progress while it does not wait for others on the host. Others may stand
// still at the same time because they wait for it on their GPUs. The ranks with the least progress are to blame.
void Job::Impl::look_for_stalls() {
    if (std::none_of(pulses.begin(), pulses.end(), [](const Pulse& p) { return p.stalled(); })) return;
    uint64_t least = UINT64_MAX;
    for (const Pulse& p : pulses)
        if (p.stalled(0.8)) least = std::min(least, p.come);
    std::string ranks;
    int first = -1;
    for (int r = 0; r < job.size; r++)
        if (pulses[r].stalled(0.8) && pulses[r].come == least) {
            ranks += (ranks.empty() ? "" : ", ") + title(r);
            if (first < 0) first = r;
        }
    end(first, 1, format("no progress for %.0f s: %s; the job ends", pulses[first].expected, ranks.c_str()));
}

void Job::Impl::watch() {
    Clock::time_point last_beat = Clock::now() - std::chrono::hours(1);
    const int first = job.rank == 0 ? 1 : 0;  // index of the first that we hear
    const auto all_gone = [&] {
        return std::all_of(pulses.begin() + first, pulses.end(), [](const Pulse& p) { return p.gone; });
    };
    Deadline give_up{};  // until when we wait for the others' goodbyes
    bool said_goodbye = false;
    for (;;) {
        if (leaving && !said_goodbye) {
            for (size_t i = first; i < beats.size(); i++) {
                send_beat(beats[i], Beat::kGoodbye, job.rank, 0, "");
                shutdown(beats[i].fd, SHUT_WR);
            }
            said_goodbye = true;
            give_up = in_seconds(5);
        }
        if (said_goodbye && (all_gone() || Clock::now() > give_up)) return;

        std::vector<pollfd> polls;
        for (size_t i = first; i < beats.size(); i++) polls.push_back({pulses[i].gone ? -1 : beats[i].fd, POLLIN, 0});
        poll(polls.data(), polls.size(), said_goodbye ? 20 : 50);
        for (size_t i = first; i < beats.size(); i++)
            if (polls[i - first].revents) listen_to(static_cast<int>(i));
        if (said_goodbye) continue;

        for (size_t i = first; i < beats.size(); i++)
            if (!pulses[i].gone && seconds_since(pulses[i].heard) > patience.silence)
                end(static_cast<int>(i), 1,
                    format("%s hangs or cannot be reached: silent for %.0f s; the job ends",
                           title(static_cast<int>(i)).c_str(), patience.silence));
        if (seconds_since(last_beat) < std::min(1.0, patience.silence / 4)) continue;
        last_beat = Clock::now();
        // If a send fails the connection broke, which the next poll will show.
        for (size_t i = first; i < beats.size(); i++)
            if (!pulses[i].gone) send_beat(beats[i], Beat::kAlive, job.rank, 0, "");
        if (job.rank == 0) {
            pulses[0].update(beat_of(Beat::kAlive, 0, 0, 0));
            look_for_stalls();
        }
        std::string wrong;
        {
            const std::lock_guard<std::mutex> lock(checking);
            if (check) wrong = check();
        }
        if (!wrong.empty()) report(wrong, 1);
    }
}

void Job::leave() {
    if (!impl_) return;
    barrier();
    impl_->leaving = true;
    impl_->watcher.join();
}

// =====================================================================================================================
// The place of this process, read from its environment

namespace {

const char* variable(const char* name) {
    const char* value = std::getenv(name);
    return value && *value ? value : nullptr;
}
int number_of(const char* name, int low, int high) {
    const char* text = variable(name);
    char* end = nullptr;
    const long value = text ? std::strtol(text, &end, 10) : 0;
    if (!text || *end || value < low || value > high)
        throw UsageError(
            format("environment variable %s: \"%s\" is not a number from %d to %d", name, text ? text : "", low, high));
    return static_cast<int>(value);
}

}  // namespace

Place place_from_environment() {
    struct Names {
        const char *rank, *size, *local;
    };
    constexpr Names launchers[] = {
        {"RANK", "WORLD_SIZE", "LOCAL_RANK"},                                            // torchrun, and --gpus
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},  // Open MPI's mpirun
        {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},                                     // MPICH's and Intel's
        {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"}};                      // srun
    Place place;
    for (const Names& n : launchers) {
        if (!variable(n.rank) || !variable(n.size)) continue;
        place.size = number_of(n.size, 1, 65536);
        place.rank = number_of(n.rank, 0, place.size - 1);
        if (variable(n.local)) place.local_rank = number_of(n.local, 0, place.size - 1);
        break;
    }
    if (place.size == 1) return {};
    if (!variable("MASTER_ADDR") || !variable("MASTER_PORT"))
        throw UsageError(
            format("rank %d of %d does not know where rank 0 is: set MASTER_ADDR to rank 0's host and MASTER_PORT to a "
                   "free port there",
                   place.rank, place.size));
    place.address = variable("MASTER_ADDR");
    place.port = number_of("MASTER_PORT", 1, 65535);
    if (const char* ours = variable("GPT2_JOB")) {
        place.job = ours;
        if (place.rank == 0 && variable("GPT2_LISTEN_FD")) place.listen_fd = number_of("GPT2_LISTEN_FD", 0, INT_MAX);
        return place;
    }
    for (const char* name :
         {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID"})
        if (const char* value = variable(name)) place.job += (place.job.empty() ? "" : ".") + std::string(value);
    // torchrun listens on MASTER_PORT itself.
    if (variable("TORCHELASTIC_RUN_ID")) place.port += 1;
    return place;
}
