// Rank 0 hears everybody who connects, and answers only who says the job's name. It never waits for
// one of them, so a stranger that is silent holds up nobody.
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
#include <memory>
#include <sstream>

namespace {

// A rank says names and values of fields, with a zero behind each. Before them come the job's name
// and its rank. Rank 0 answers with a mark, what is wrong, a zero and its blob. Who has said all
// closes that direction.
const std::string kMark = "gpt2 ranks: ";

struct Socket {
    const int fd;
    std::string heard;
    explicit Socket(int fd) : fd(fd) {}
    ~Socket() { close(fd); }
    Socket(const Socket&) = delete;

    // Failures need no check. The other side will miss what was not sent.
    void say(const std::string& all) const {
        if (send(fd, all.data(), all.size(), MSG_NOSIGNAL) > 0)
            shutdown(fd, SHUT_WR);
    }
    // Takes what has come, without waiting, and returns whether that is all.
    bool hear() {
        char more[4096];
        while (heard.size() < 1 << 18) {  // else it is too long
            const ssize_t n = recv(fd, more, sizeof more, MSG_DONTWAIT);
            if (n <= 0)
                return n == 0 || errno != EAGAIN;
            heard.append(more, n);
        }
        return true;
    }
};

Fields fields_of(const std::string& hello) {
    std::istringstream in(hello);
    Fields all;
    for (std::string name, value; std::getline(in, name, '\0') && std::getline(in, value, '\0');)
        all.push_back({name, value});
    return all;
}

// Where a host's port may be. localhost is one address, so that rank 0 and the others mean the
// same.
std::unique_ptr<addrinfo, void (*)(addrinfo*)> look_up(const std::string& host, int port,
                                                       int flags) {
    addrinfo hints = {};
    addrinfo* found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    const int error = getaddrinfo(host == "localhost" ? "127.0.0.1" : host.c_str(),
                                  std::to_string(port).c_str(), &hints, &found);
    return {error ? nullptr : found, freeaddrinfo};
}

// The fields in which ranks differ from rank 0. Programs with other names of fields differ in the
// field "program".
std::string differences(const std::vector<Fields>& ranks) {
    std::string all;
    for (size_t i = 1; i < ranks[0].size(); i++)
        for (const Fields& r : ranks) {
            const auto& [name, first] = ranks[0][i];
            const std::string value = i < r.size() ? r[i].value : "";
            if (value != first && all.size() < 10000)
                all += format("; %s: rank %s has \"%s\", rank 0 has \"%s\"", name.c_str(),
                              r[0].value.c_str(), value.c_str(), first.c_str());
        }
    return all.empty() ? ""
                       : "the ranks of a job must have the same program, arguments and data" + all;
}

// Rank 0's part. Returns what it has answered to all.
std::string answer_all(const Place& place, const std::string& me, const std::string& blob,
                       double patience) {
    const Socket listener(listen_at(place.address, place.port));
    std::vector<Fields> ranks(place.size);  // what they have said
    ranks[0] = fields_of(me);
    std::list<Socket> guests;
    std::list<Socket> members;  // who have not said all, and the ranks that have
    std::string missing;
    std::string refused = "nobody";
    for (const double deadline = now() + patience;
         members.size() + 1 < ranks.size() && now() < deadline;) {
        pollfd p = {listener.fd, POLLIN, 0};
        if (poll(&p, 1, 10) > 0)
            guests.emplace_back(accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC));
        // the one that has been silent for the longest
        if (guests.size() > 256)
            guests.pop_front();
        for (auto next = guests.begin(); next != guests.end();) {
            const auto guest = next++;
            if (!guest->hear())
                continue;
            const Fields hello = fields_of(guest->heard);
            const bool ours = !hello.empty() && hello[0].name == place.job;
            const int rank = ours ? std::atoi(hello[0].value.c_str()) : -1;
            if (rank > 0 && rank < place.size && ranks[rank].empty()) {
                ranks[rank] = hello;
                members.splice(members.end(), guests, guest);
                continue;
            }
            refused =
                ours
                    ? format(
                          "rank %d is one too many; start all with the same number, each rank once",
                          rank)
                    : "one came without this job's name; set one GPT2_JOB for all ranks";
            if (ours)
                guest->say(kMark + refused);
            guests.erase(guest);
        }
    }
    for (int r = 0; r < place.size; r++)
        if (ranks[r].empty())
            missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    std::string answer =
        format("of %d ranks these did not come to port %d in %.0f s: %s; refused: %s", place.size,
               place.port, patience, missing.c_str(), refused.c_str());
    if (missing.empty())
        answer = differences(ranks) + '\0' + blob;
    for (const Socket& s : members)
        s.say(kMark + answer);
    return answer;
}

// Connects a non-blocking socket. Returns 0, or why that failed. Where a firewall drops what we
// send, connect() by itself would wait for two minutes.
int connect_within(double seconds, int fd, const addrinfo& to) {
    const double deadline = now() + seconds;
    if (connect(fd, to.ai_addr, to.ai_addrlen) == 0)
        return 0;
    if (errno != EINPROGRESS && errno != EINTR)
        return errno;

    pollfd connected = {fd, POLLOUT, 0};
    int ready;
    do {
        ready = poll(&connected, 1, static_cast<int>(1e3 * std::max(deadline - now(), 0.0)));
    } while (ready < 0 && errno == EINTR);
    if (ready == 0)
        return ETIMEDOUT;

    int error = 0;
    socklen_t size = sizeof error;
    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) ? errno : error;
}

// The other ranks' part. Returns what rank 0 answers when all have come, or when its patience has
// ended. Rank 0 may start later than we. Until then others may answer at its port, or a socket that
// connects to itself.
std::string ask_first(const Place& place, const std::string& me, double patience) {
    std::string why = "there is no such host";
    for (const double deadline = now() + patience; now() < deadline; usleep(50000)) {
        const auto found = look_up(place.address, place.port, 0);
        for (const addrinfo* a = found.get(); a; a = a->ai_next) {
            Socket s(socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
            // A try is short, because the name may mean another address by now.
            const int error = connect_within(std::min(2.0, deadline - now()), s.fd, *a);
            if (error) {
                why = std::strerror(error);
                continue;
            }
            why = "what answers there is not rank 0 of this job, or it has failed";
            s.say(me);
            while (!s.hear() && now() < deadline + patience)
                usleep(10000);
            if (s.heard.rfind(kMark, 0) == 0)
                return s.heard.substr(kMark.size());
        }
    }
    throw Error(
        format("cannot reach rank 0 at %s port %d: %s; check MASTER_ADDR, MASTER_PORT and GPT2_JOB",
               place.address.c_str(), place.port, why.c_str()));
}

}  // namespace

std::string rendezvous(const Place& place, const Fields& fields, const std::string& blob,
                       double patience) {
    if (place.size == 1)
        return blob;
    Fields all = {{place.job, std::to_string(place.rank)},
                  {"number of ranks", std::to_string(place.size)}};
    all.insert(all.end(), fields.begin(), fields.end());
    std::string me;
    for (const auto& [name, value] : all) {
        me += name;
        me += '\0';
        me += value;
        me += '\0';
    }
    const std::string answer =
        place.rank == 0 ? answer_all(place, me, blob, patience) : ask_first(place, me, patience);
    std::string wrong = answer.c_str();  // up to the zero
    if (wrong.empty())
        return answer.substr(1);
    for (char& c : wrong)
        if (c < ' ' || c > '~')
            c = '?';  // others may have sent it
    throw Error(wrong);
}

int listen_at(const std::string& address, int port) {
    auto found = look_up(address, port, AI_NUMERICHOST);
    if (!found)
        found = look_up("0.0.0.0", port, AI_NUMERICHOST);
    const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;  // lets us take a port whose last connections have only just closed
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
