// Rank 0 hears everybody who connects, and answers only who says the job's name. It never waits for one of them, so a
// stranger that is silent holds up nobody.
#include "layers/comm/meet.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>

namespace {

constexpr size_t kLongest = 1 << 18;    // message that we take from others
constexpr size_t kMostStrangers = 256;  // that wait at once, besides the ranks
// An answer begins so. Then comes what is wrong, or if nothing is, "", the hosts of all ranks and rank 0's blob.
constexpr const char* kAnswer = "gpt2 ranks";

// A message is a list of texts with a zero behind each. It ends where its sender closes that direction.
using Texts = std::vector<std::string>;
std::string joined(const Texts& texts) {
    std::string message;
    for (const std::string& text : texts) message += text + '\0';
    return message;
}

// A connection. Connecting and sending block for at most 5 s.
struct Socket {
    const int fd;
    std::string heard;
    explicit Socket(int fd) : fd(fd) {
        const timeval limit = {5, 0};
        const int on = 1;  // lets rank 0 have the port, in case this socket connects to itself (see ask_first)
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    }
    ~Socket() { close(fd); }
    Socket(const Socket&) = delete;

    void say(const Texts& texts) const {
        const std::string message = joined(texts);
        // Failures need no check. The other side will miss what was not sent.
        if (send(fd, message.data(), message.size(), MSG_NOSIGNAL) > 0) shutdown(fd, SHUT_WR);
    }
    // Takes what has come, without waiting, and returns whether that is all.
    bool hear() {
        char more[4096];
        ssize_t n = 1;
        while (n > 0 && heard.size() < kLongest) {
            n = recv(fd, more, sizeof more, MSG_DONTWAIT);
            if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
            if (n > 0) heard.append(more, n);
        }
        return true;
    }
    Texts texts() const {
        std::istringstream in(heard);
        Texts all;
        for (std::string text; std::getline(in, text, '\0');) all.push_back(text);
        return all;
    }
};

// Where a host's port may be. localhost is one address, so that rank 0 and the others mean the same.
std::unique_ptr<addrinfo, void (*)(addrinfo*)> look_up(const std::string& host, int port, int flags) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    getaddrinfo(host == "localhost" ? "127.0.0.1" : host.c_str(), std::to_string(port).c_str(), &hints, &found);
    return {found, freeaddrinfo};
}

// Tries again until the deadline, because rank 0 may start later than we.
std::unique_ptr<Socket> connect_to(const std::string& host, int port, double deadline) {
    int error = EADDRNOTAVAIL;
    for (; now() < deadline; usleep(50000)) {
        const auto found = look_up(host, port, 0);
        for (const addrinfo* a = found.get(); a; a = a->ai_next) {
            auto s = std::make_unique<Socket>(socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
            if (connect(s->fd, a->ai_addr, a->ai_addrlen) == 0) return s;
            error = errno == EINPROGRESS ? ETIMEDOUT : errno;
        }
    }
    throw Error(
        format("cannot reach rank 0 at %s port %d: %s; is it running, and are MASTER_ADDR and MASTER_PORT right?",
               host.c_str(), port, std::strerror(error)));
}

// What a rank says of itself.
struct Hello {
    Texts texts;  // the job's name, rank, size, title, host, and then names and values of fields
    std::unique_ptr<Socket> socket = nullptr;
    bool is_of(const std::string& job) const { return texts.size() >= 5 && texts[0] == job; }
    int rank() const { return std::atoi(texts[1].c_str()); }
    int size() const { return std::atoi(texts[2].c_str()); }
    const char* title() const { return texts[3].c_str(); }
    const std::string& host() const { return texts[4]; }
    std::string value_of(const std::string& field) const {
        for (size_t i = 5; i + 1 < texts.size(); i += 2)
            if (texts[i] == field) return "\"" + texts[i + 1] + "\"";
        return "nothing";
    }
};

// The fields in which ranks differ from rank 0, as many as fit into a message, or "".
std::string differences(const std::vector<Hello>& ranks) {
    std::string all;
    for (size_t i = 5; i < ranks[0].texts.size(); i += 2)
        for (const Hello& r : ranks) {
            const std::string &field = ranks[0].texts[i], value = r.value_of(field), first = ranks[0].value_of(field);
            if (value != first && all.size() < 10000)
                all += format("; %s: %s has %s, rank 0 has %s", field.c_str(), r.title(), value.c_str(), first.c_str());
        }
    return all.empty() ? "" : "the ranks of a job must have the same program, arguments and data" + all;
}

// What is wrong with a guest of this job, "" if it is one of the ranks that are missing.
std::string refusal(const Hello& guest, const std::vector<Hello>& ranks) {
    const int size = static_cast<int>(ranks.size());
    if (guest.size() != size)
        return format("%s was started as one of %d ranks, rank 0 as one of %d; start all with the same number",
                      guest.title(), guest.size(), size);
    if (guest.rank() < 0 || guest.rank() >= size || !ranks[guest.rank()].texts.empty())
        return format("%s has come already; two processes have the same rank, or an earlier job waits", guest.title());
    return "";
}

// Rank 0's part. Returns what it has answered to all.
Texts answer_all(const Place& place, const Texts& me, const std::string& blob, double patience) {
    const Socket listener(place.listen_fd >= 0 ? place.listen_fd : listen_at(place.address, place.port));
    std::vector<Hello> ranks(place.size);
    ranks[0].texts = me;
    std::vector<std::unique_ptr<Socket>> strangers;  // who have not said all yet
    Texts answer;
    std::string last_refusal;
    for (const double deadline = now() + patience; answer.empty();) {
        pollfd p = {listener.fd, POLLIN, 0};
        if (poll(&p, 1, 10) > 0)
            strangers.push_back(std::make_unique<Socket>(accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC)));
        // The oldest makes room, also if there are no more descriptors.
        if (strangers.size() > ranks.size() + kMostStrangers || (!strangers.empty() && strangers.back()->fd < 0))
            strangers.erase(strangers.begin());
        for (size_t i = 0; i < strangers.size(); i++) {
            if (!strangers[i]->hear()) continue;
            Hello guest{strangers[i]->texts(), std::move(strangers[i])};
            strangers.erase(strangers.begin() + i--);
            std::string why = "one came without this job's name; set one GPT2_JOB for all ranks";
            if (guest.is_of(place.job)) {
                why = refusal(guest, ranks);
                if (why.empty())
                    std::swap(ranks[guest.rank()], guest);
                else
                    guest.socket->say({kAnswer, why});
            }
            if (!why.empty()) last_refusal = ", and refused: " + why;
        }
        std::string missing;
        for (int r = 0; r < place.size; r++)
            if (ranks[r].texts.empty()) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
        if (missing.empty())
            answer = {kAnswer, differences(ranks)};
        else if (now() >= deadline)
            answer = {kAnswer,
                      format("of %d ranks these did not come to port %d in %.0f s: %s; look at their output%s",
                             place.size, port_of(listener.fd), patience, missing.c_str(), last_refusal.c_str())};
    }
    if (answer[1].empty()) {
        for (const Hello& r : ranks) answer.push_back(r.host());
        answer.push_back(blob);
    }
    for (const Hello& r : ranks)
        if (r.socket) r.socket->say(answer);
    return answer;
}

// The other ranks' part. Returns what rank 0 answers when all have come, or when its patience has ended.
Texts ask_first(const Place& place, const Texts& me, double patience) {
    const double deadline = now() + patience;
    Texts answer = me;
    while (answer == me) {  // while nobody listens at the port, a socket may connect to itself and hear what it says
        const auto s = connect_to(place.address, place.port, deadline);
        s->say(me);
        for (const double give_up = now() + patience + 5; !s->hear() && now() < give_up;) usleep(10000);
        answer = s->texts();
    }
    if (answer.size() >= 2 && answer[0] == kAnswer && (!answer[1].empty() || answer.size() > size_t(place.size) + 2))
        return answer;
    throw Error(
        format("what answers at %s port %d is not rank 0 of this job, or it has failed; see rank 0's output, "
               "or set another MASTER_PORT, or one GPT2_JOB for all ranks",
               place.address.c_str(), place.port));
}

}  // namespace

Meeting meet(const Place& place, const Fields& fields, const std::string& blob, double patience) {
    if (place.size == 1) return {0, 1, blob};
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    const std::string title = format("rank %d (pid %d on %s)", place.rank, static_cast<int>(getpid()), host);
    Texts me = {place.job, std::to_string(place.rank), std::to_string(place.size), title, host};
    me.insert(me.end(), {"number of fields", std::to_string(fields.size())});
    for (const auto& [name, value] : fields) me.insert(me.end(), {name, value});
    const Texts answer = place.rank == 0 ? answer_all(place, me, blob, patience) : ask_first(place, me, patience);
    if (!answer[1].empty()) throw Error(printable(answer[1]));
    const auto hosts = answer.begin() + 2, mine = hosts + place.rank, end = hosts + place.size;
    Meeting meeting{static_cast<int>(std::count(hosts, mine, *mine)), static_cast<int>(std::count(hosts, end, *mine)),
                    joined({end, answer.end()})};
    meeting.blob.pop_back();  // the zero behind it
    if (place.local_rank >= 0) meeting.local_rank = place.local_rank;
    if (place.local_size >= 0) meeting.local_size = place.local_size;
    return meeting;
}

int listen_at(const std::string& address, int port) {
    auto found = look_up(address, port, AI_NUMERICHOST);
    if (!found) found = look_up("0.0.0.0", port, AI_NUMERICHOST);
    const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;  // lets us take a port whose last connections have only just closed
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 1024) == 0) return fd;
    const std::string why = std::strerror(errno);
    close(fd);
    throw Error(format(
        "cannot listen on port %d of %s: %s; set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there",
        port, address.c_str(), why.c_str()));
}
int port_of(int fd) {
    sockaddr_in6 a = {};  // has room for an address of IPv4, where the port stands at the same place
    socklen_t length = sizeof a;
    getsockname(fd, reinterpret_cast<sockaddr*>(&a), &length);
    return ntohs(a.sin6_port);
}
std::string printable(std::string text) {
    for (char& c : text)
        if (c < ' ' || c > '~') c = '?';
    return text;
}
double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

