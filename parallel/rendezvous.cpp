// Rank 0 reads from everyone who connects, but answers only those who send the job's name. It never
// blocks on a connection, so a stranger who sends nothing delays nobody.
//
// A rank sends a Hello and shuts down its direction of the connection. Rank 0's answer to all is
// kMark, then what is wrong ("" if nothing), a zero byte, and the NCCL id.
#include "parallel/rendezvous.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

namespace {

// -------------------------------------------------------------------------------------------------
// Messages

const std::string kMark = "gpt2 ranks: ";

struct Hello {
    std::string job;
    int rank = -1;
    Fields fields;
};

// A hello is sent as strings that each end with a zero byte: the job's name and the rank, then the
// name and the value of every field.
std::string encode(const Hello& hello) {
    std::string text;
    const auto add = [&](const std::string& string) {
        text += string;
        text += '\0';
    };
    add(hello.job);
    add(std::to_string(hello.rank));
    for (const auto& [name, value] : hello.fields) {
        add(name);
        add(value);
    }
    return text;
}

std::optional<Hello> decode(const std::string& text) {
    std::istringstream in(text);
    const auto read = [&](std::string& string) {
        return static_cast<bool>(std::getline(in, string, '\0'));
    };
    Hello hello;
    std::string rank;
    if (!read(hello.job) || !read(rank))
        return std::nullopt;
    hello.rank = std::atoi(rank.c_str());

    Field field;
    while (read(field.name) && read(field.value)) {
        hello.fields.push_back(field);
    }
    return hello;
}

std::string make_answer(const std::string& problem, const std::string& nccl_id) {
    return kMark + problem + '\0' + nccl_id;
}

// Whether this is an answer of rank 0 that has not broken off before the zero byte.
bool is_answer(const std::string& text) {
    return text.starts_with(kMark) && text.find('\0') != std::string::npos;
}

// Returns the NCCL id. Throws Error if the answer says that something is wrong.
std::string open_answer(const std::string& answer) {
    const size_t begin = kMark.size();
    const size_t end = answer.find('\0');
    std::string problem = answer.substr(begin, end - begin);
    if (problem.empty())
        return answer.substr(end + 1);

    // A part of it may come from a stranger and is not to control the terminal.
    for (char& c : problem) {
        if (c < ' ' || c > '~')
            c = '?';
    }
    throw Error(problem);
}

// -------------------------------------------------------------------------------------------------
// Sockets

struct Socket {
    const int fd;
    std::string received;

    explicit Socket(int fd) : fd(fd) {}
    ~Socket() { close(fd); }
    Socket(const Socket&) = delete;

    // Failures need no check: the other side will notice that something is missing.
    void send_all(const std::string& text) const {
        if (send(fd, text.data(), text.size(), MSG_NOSIGNAL) > 0)
            shutdown(fd, SHUT_WR);
    }

    // Reads what has arrived, without waiting. Returns whether the message has ended: the other
    // side has shut down its direction, the connection is broken, or the message is too long.
    bool receive() {
        constexpr size_t kTooLong = 1 << 18;
        char piece[4096];
        while (received.size() < kTooLong) {
            const ssize_t n = recv(fd, piece, sizeof piece, MSG_DONTWAIT);
            if (n == 0)
                return true;
            if (n < 0)
                return errno != EAGAIN;
            received.append(piece, n);
        }
        return true;
    }
};

// The addresses of a port of a host, or null. localhost is one address, so that all ranks mean the
// same.
std::unique_ptr<addrinfo, void (*)(addrinfo*)> look_up(const std::string& host, int port,
                                                       int flags) {
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;

    addrinfo* found = nullptr;
    const int error = getaddrinfo(host == "localhost" ? "127.0.0.1" : host.c_str(),
                                  std::to_string(port).c_str(), &hints, &found);
    return {error ? nullptr : found, freeaddrinfo};
}

// Connects a non-blocking socket. Returns 0, or the errno that says why it could not. connect() by
// itself would wait for two minutes if a firewall drops our packets.
int connect_within(double seconds, int fd, const addrinfo& to) {
    const double deadline = now() + seconds;
    if (connect(fd, to.ai_addr, to.ai_addrlen) == 0)
        return 0;
    if (errno != EINPROGRESS && errno != EINTR)
        return errno;

    pollfd connected = {.fd = fd, .events = POLLOUT, .revents = 0};
    int ready = -1;
    do {
        const double left = std::max(deadline - now(), 0.0);
        ready = poll(&connected, 1, static_cast<int>(1e3 * left));
    } while (ready < 0 && errno == EINTR);
    if (ready == 0)
        return ETIMEDOUT;

    int error = 0;
    socklen_t size = sizeof error;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
        return errno;
    return error;
}

// -------------------------------------------------------------------------------------------------
// Rank 0

using Hellos = std::map<int, Hello>;  // what each rank that has connected has sent, by rank

// The fields in which ranks differ from rank 0, or "". Fields are compared by position; ranks whose
// fields have other names run another program, and differ in the field "program".
std::string differences(const Hellos& hellos) {
    constexpr size_t kMostBytes = 10000;
    const Fields& expected = hellos.at(0).fields;
    std::string found;
    for (size_t i = 0; i < expected.size(); i++) {
        for (const auto& [rank, hello] : hellos) {
            const std::string value = i < hello.fields.size() ? hello.fields[i].value : "";
            if (value != expected[i].value && found.size() < kMostBytes)
                found +=
                    format("; %s: rank %d has \"%s\", rank 0 has \"%s\"", expected[i].name.c_str(),
                           rank, value.c_str(), expected[i].value.c_str());
        }
    }
    if (found.empty())
        return "";
    return "all ranks of a job must have the same program, arguments and data" + found;
}

class Rank0 {
  public:
    Rank0(const RankInfo& self, const Hello& own)
        : self_(self), listener_(listen_at(self.address, self.port)), hellos_{{0, own}} {}

    // Waits for the other ranks, and returns what it has answered to all of them.
    std::string answer_ranks(const std::string& nccl_id, double timeout) {
        const double deadline = now() + timeout;
        while (!is_complete() && now() < deadline) {
            accept_next();
            for (auto next = strangers_.begin(); next != strangers_.end();) {
                const auto stranger = next;
                ++next;  // before `stranger` leaves the list
                read(stranger);
            }
        }

        const std::string problem =
            is_complete()
                ? differences(hellos_)
                : format(
                      "these of the %d ranks did not connect to port %d within %.0f s: %s; check "
                      "that they have been started and can reach it (last connection refused: %s)",
                      self_.size, self_.port, timeout, missing_ranks().c_str(),
                      last_refusal_.c_str());
        const std::string answer = make_answer(problem, nccl_id);
        for (const Socket& member : members_) {
            member.send_all(answer);
        }
        return answer;
    }

  private:
    using Connection = std::list<Socket>::iterator;

    const RankInfo& self_;
    const Socket listener_;
    std::list<Socket> strangers_;  // who have not sent everything yet, the oldest first
    std::list<Socket> members_;    // ranks, which wait for the answer
    Hellos hellos_;
    std::string last_refusal_ = "none";

    bool is_complete() const { return hellos_.size() == static_cast<size_t>(self_.size); }

    std::string missing_ranks() const {
        std::string missing;
        for (int rank = 0; rank < self_.size; rank++) {
            if (hellos_.contains(rank))
                continue;
            if (!missing.empty())
                missing += ", ";
            missing += std::to_string(rank);
        }
        return missing;
    }

    void accept_next() {
        constexpr int kMilliseconds = 10;
        constexpr size_t kMostStrangers = 256;
        pollfd incoming = {.fd = listener_.fd, .events = POLLIN, .revents = 0};
        // If accept4() fails, the stranger's fd is −1, and read() refuses it.
        if (poll(&incoming, 1, kMilliseconds) > 0)
            strangers_.emplace_back(accept4(listener_.fd, nullptr, nullptr, SOCK_CLOEXEC));
        if (strangers_.size() > kMostStrangers)
            strangers_.pop_front();
    }

    // Reads from a stranger who, once everything has been sent, becomes a member or is refused.
    void read(Connection stranger) {
        if (!stranger->receive())
            return;

        const std::optional<Hello> hello = decode(stranger->received);
        if (!hello || hello->job != self_.job) {
            last_refusal_ =
                "it did not send this job's name, so set the same GPT2_JOB on all ranks";
            strangers_.erase(stranger);
            return;
        }

        const int rank = hello->rank;
        if (rank <= 0 || rank >= self_.size || hellos_.contains(rank)) {
            last_refusal_ = format(
                "rank %d has connected already or is not below the number of ranks; start each "
                "rank once, all of them with the same number of ranks",
                rank);
            stranger->send_all(make_answer(last_refusal_, ""));
            strangers_.erase(stranger);
            return;
        }

        hellos_[rank] = *hello;
        members_.splice(members_.end(), strangers_, stranger);
    }
};

// -------------------------------------------------------------------------------------------------
// The other ranks

// Returns the answer of rank 0, which it sends when all ranks have connected or its timeout is
// over. Rank 0 may start later than this rank. Until then another program may answer at its port,
// or a socket may connect to itself.
std::string ask_rank_0(const RankInfo& self, const Hello& own, double timeout) {
    constexpr double kSecondsPerAddress = 2;  // few, because the name may soon mean another address
    const std::string hello = encode(own);
    std::string why = "there is no such host";

    const double deadline = now() + timeout;
    while (now() < deadline) {
        const auto found = look_up(self.address, self.port, 0);
        for (const addrinfo* address = found.get(); address; address = address->ai_next) {
            Socket s(socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
            const double seconds = std::min(kSecondsPerAddress, deadline - now());
            const int error = connect_within(seconds, s.fd, *address);
            if (error) {
                why = std::strerror(error);
                continue;
            }

            s.send_all(hello);
            // Rank 0 answers at the latest when its own timeout is over. It listens already, so
            // that is before deadline + timeout.
            while (!s.receive() && now() < deadline + timeout) {
                usleep(10000);
            }
            if (is_answer(s.received))
                return s.received;
            why = "another program answered, or rank 0 has failed";
        }
        usleep(50000);
    }
    throw Error(
        format("cannot reach rank 0 at %s port %d: %s; check MASTER_ADDR, MASTER_PORT and GPT2_JOB",
               self.address.c_str(), self.port, why.c_str()));
}

}  // namespace

std::string rendezvous(const RankInfo& self, const Fields& fields, const std::string& nccl_id,
                       double timeout) {
    if (self.size == 1)
        return nccl_id;

    Hello own = {.job = self.job, .rank = self.rank, .fields = {}};
    own.fields.push_back({"number of ranks", std::to_string(self.size)});
    own.fields.insert(own.fields.end(), fields.begin(), fields.end());
    return open_answer(self.rank == 0 ? Rank0(self, own).answer_ranks(nccl_id, timeout)
                                      : ask_rank_0(self, own, timeout));
}

int listen_at(const std::string& address, int port) {
    auto found = look_up(address, port, AI_NUMERICHOST);
    if (!found)
        found = look_up("0.0.0.0", port, AI_NUMERICHOST);
    const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    // The port can be used even if connections of an earlier job have only just been closed.
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 1024) == 0)
        return fd;

    const std::string why = std::strerror(errno);
    close(fd);
    throw Error(
        format("cannot listen on port %d of %s: %s; "
               "set MASTER_ADDR to this host and MASTER_PORT to a free port",
               port, address.c_str(), why.c_str()));
}
