// Tests the processes of a job without a model: meeting, exchanging, the collectives of the CPU, and every way in which
// a rank can be missing, wrong, dead or stuck. Ranks are forked children, and what they write to stderr is read back.
//
// Run: ./dev/test_job [part of a test's name]
#include <netdb.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <thread>

#include "dev/ranks.h"
#include "layers/comm/reference_comm.h"

namespace {

// A connection that has sent `text`, as soon as a process that was started before listens at the port.
int connect_and_say(int port, const std::string& text) {
    sockaddr_in a = {};
    a.sin_family = AF_INET;
    a.sin_port = htons(static_cast<uint16_t>(port));
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < 10000; i++, sleep_for(0.01)) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0)
            return send(fd, text.data(), text.size(), MSG_NOSIGNAL), fd;
        close(fd);
    }
    throw Error("nobody listens");
}

std::string hello_by(const std::string& name, int rank, int size, const std::string& host = "here") {
    return format("gpt2job2 %d %d 1 1 %s there %s\n", rank, size, host.c_str(), name.c_str());
}

int count_of(const std::string& text, const std::string& part) {
    int n = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) n++;
    return n;
}

void wait_for_text(Processes& ranks, const std::string& text, int times = 1) {
    for (int i = 0; i < 10000 && count_of(ranks.text(), text) < times; i++) sleep_for(0.01);
}

// Values that differ from rank to rank and whose sums round. Ranks are summed in order, so sums are equal bit for bit.
template <class A>
std::vector<A> values(int rank, size_t n) {
    std::vector<A> x(n);
    for (size_t i = 0; i < n; i++) x[i] = A(1) / A(3 + (i * 7 + rank * 13) % 101);
    return x;
}
template <class A>
std::vector<A> sum_of_values(int size, size_t n) {
    std::vector<A> sum = values<A>(0, n);
    for (int r = 1; r < size; r++)
        for (size_t i = 0; i < n; i++) sum[i] += values<A>(r, n)[i];
    return sum;
}

template <class A>
void check_collectives(Job& job) {
    CpuComm comm(Cpu(1), job);
    const int size = job.size, rank = job.rank, next = (rank + 1) % size, before = (rank + size - 1) % size;
    for (const size_t n : {1, 2, 7, 64, 1001}) {
        const std::vector<A> one = values<A>(rank, n), sum = sum_of_values<A>(size, size * n);
        std::vector<A> reduced = one, own(n, A(NAN)), all(size * n, A(NAN)), want;
        comm.all_reduce(reduced.data(), n);
        CHECK(reduced == sum_of_values<A>(size, n));
        comm.reduce_scatter(own.data(), values<A>(rank, size * n).data(), n);
        CHECK(std::equal(own.begin(), own.end(), sum.begin() + rank * n));
        std::copy(one.begin(), one.end(), all.begin() + rank * n);
        comm.all_gather(all.data(), n);
        for (int r = 0; r < size; r++)
            for (A x : values<A>(r, n)) want.push_back(x);
        CHECK(all == want);

        const auto sent_by = [&](int r) { return n - r % 2 * (n / 2); };
        std::vector<A> got(sent_by(before), A(NAN));
        comm.send_recv(next, one.data(), sent_by(rank), before, got.data(), got.size());
        CHECK(got == values<A>(before, got.size()));
    }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Meeting and exchanging

TEST(alone_every_call_returns) {
    Job job;
    CHECK(job.rank == 0 && job.size == 1);
    CHECK_ERROR(job.guard([]() -> int { throw Error("through"); }), "through");
    job.leave();
}

TEST(ranks_exchange) {
    for (int size : {1, 2, 3, 4, 5})
        run_ranks(size, [](Job& job) {
            CHECK(job.local_rank == job.rank && job.local_size == job.size);
            const std::vector<int> all = job.all_gather(10 * job.rank);
            const std::vector<std::string> texts = job.all_gather(std::string(job.rank * 1000, 'x'));
            for (int r = 0; r < job.size; r++) CHECK(all[r] == 10 * r && texts[r] == std::string(r * 1000, 'x'));
            std::vector<int> from_first(1 << 20, job.rank == 0 ? 7 : 0);  // more than a socket holds
            job.broadcast(from_first.data(), from_first.size() * sizeof(int));
            CHECK(from_first.front() == 7 && from_first.back() == 7);
            job.agree({{"model", "d12"}, {"lr", "1"}});
            if (job.size < 5) check_collectives<float>(job), check_collectives<double>(job);  // they take a moment
            job.leave();
            if (job.size > 1) CHECK_ERROR(job.barrier(), "has left its job");
        });
}

// Rank 2 waits for longer than its patience, because each of the others comes within its own.
TEST(ranks_may_come_in_any_order_and_leave_at_any_time) {
    const int port = free_port();
    const double comes[3] = {3, 6, 0};
    Processes ranks;
    for (int rank = 0; rank < 3; rank++)
        ranks.start([=] {
            sleep_for(comes[rank]);
            Job job({rank, 3, 2 - rank, "localhost", port, "", -1}, {5, 2});
            CHECK(job.local_rank == 2 - rank);  // as the launcher says
            CHECK(job.all_gather(rank)[2] == 2);
            job.leave();
            sleep_for(rank == 1 ? 2.5 : 0);  // longer than a silence
            return 0;
        });
    ranks.check();
}

// A job that is destroyed says goodbye, so that it does not look like a death.
TEST(a_rank_may_go_without_the_others) {
    run_ranks(2, [](Job& job) { sleep_for(job.rank == 0 ? 0.5 : 0); });
}

// Host names say that rank 1 is on another machine.
TEST(machines_are_told_apart) {
    const auto move = [] { return unshare(CLONE_NEWUSER | CLONE_NEWUTS) == 0 && sethostname("elsewhere", 9) == 0; };
    Processes probe, ranks;
    probe.start([&] { return move() ? 0 : 77; });
    if (probe.wait()[0] == 77) SKIP("no machine names of our own here");
    const int port = free_port();
    for (int rank = 0; rank < 3; rank++)
        ranks.start([=] {
            CHECK(rank != 1 || move());
            Job job(local_place(rank, 3, port));
            CHECK(job.local_rank == rank / 2 && job.local_size == (rank == 1 ? 1 : 2));
            job.leave();
            return 0;
        });
    ranks.check();
}

TEST(a_rank_that_works_long_is_not_missed) {
    const auto body = [](Job& job) {
        job.expect_progress(2);
        for (int i = 0; i < 8 && job.rank == 1; i++) sleep_for(0.5), Job::progress()++;  // with signs of life
        job.barrier();
        job.expect_progress(0);
        if (job.rank == 0) sleep_for(3);  // nothing is expected
        job.leave();
    };
    ForkedRanks(2, body, {60, 2}).check();
}

// Every beat may find a step at the same point. That is no standstill.
TEST(many_equal_steps_are_progress) {
    run_ranks(2, [](Job& job) {
        for (int step = 0; step < 40; step++) {
            job.expect_progress(3);
            Job::progress()++;
            sleep_for(0.1);
            job.expect_progress(0);
            job.barrier();
        }
        job.leave();
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Wrong and missing ranks

// All of these ranks, each (rank, size), end with an error that one of them prints.
TEST(missing_and_wrong_ranks_are_named) {
    struct {
        std::vector<std::pair<int, int>> ranks;
        std::vector<std::string> says;
        Processes processes = {};
    } cases[] = {{{{0, 4}, {2, 4}}, {"of 4 ranks these did not come to port", ": 1, 3;"}},
                 {{{0, 2}, {2, 3}}, {"and refused: rank 2", "as one of 3 ranks"}},
                 {{{0, 3}, {1, 3}, {1, 3}}, {"two processes have the same rank"}}};
    for (auto& c : cases) {
        const int port = free_port();
        for (const auto& [rank, size] : c.ranks) c.processes.start_rank(local_place(rank, size, port), {4, 20});
    }
    for (auto& c : cases) c.processes.check(std::vector<int>(c.ranks.size(), 1), c.says);
}

// While they meet, ranks listen only at the address that they are given. Each looks at its own sockets.
TEST(nobody_listens_at_other_addresses) {
    const auto print_listeners = [] {
        for (bool any = false; !any;) {
            sleep_for(0.5);
            for (int fd = 3; fd < 100; fd++) {
                int listens = 0;
                char host[64] = "";
                sockaddr_storage a = {};
                socklen_t length = sizeof listens, address_length = sizeof a;
                if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) || !listens) continue;
                getsockname(fd, reinterpret_cast<sockaddr*>(&a), &address_length);
                getnameinfo(reinterpret_cast<sockaddr*>(&a), address_length, host, sizeof host, nullptr, 0,
                            NI_NUMERICHOST);
                std::fprintf(stderr, "listens at %s\n", host), any = true;
            }
        }
    };
    for (const std::string address : {"localhost", "127.1.2.3", "::1"}) {
        if (address == "::1" && access("/proc/net/if_inet6", F_OK)) continue;
        Processes ranks;
        const int port = free_port();
        for (int rank : {0, 1, 2}) {
            if (rank == 2) wait_for_text(ranks, "listens at ", 2);
            ranks.start([&] {
                if (rank < 2) std::thread(print_listeners).detach();
                Job({rank, 3, -1, address, port, "", -1}).leave();
                return 0;
            });
        }
        const std::string own = "listens at " + (address == "localhost" ? "127.0.0.1" : address) + "\n";
        ranks.check();
        CHECK(count_of(ranks.text(), "listens at ") == 2 && count_of(ranks.text(), own) == 2);
    }
}

// A new job neither joins nor disturbs an earlier one that still waits for ranks.
TEST(an_old_job_is_never_joined) {
    const int port = free_port();
    Processes old, young;
    old.start_rank(local_place(0, 2, port, "old"));
    close(connect_and_say(port, ""));
    for (int rank : {1, 0}) young.start_rank(local_place(rank, 2, port, "young"));
    young.check({1, 1},
                {"refused by rank 0: this rank is not of the job that meets", "cannot listen on port", "MASTER_PORT"});
    old.start_rank(local_place(1, 2, port, "old"));
    old.check();
}

TEST(a_running_job_cannot_be_joined) {
    int gate[2];  // closed until the parent closes its end
    CHECK(pipe(gate) == 0);
    ForkedRanks ranks(2, [=](Job& job) {
        job.barrier();
        std::fprintf(stderr, "met\n");
        char byte;
        close(gate[1]);
        CHECK(read(gate[0], &byte, 1) == 0);
        job.leave();
    });
    wait_for_text(ranks, "met");
    CHECK_ERROR(Job(local_place(1, 2, ranks.port, "a job"), {0.3, 1}), "cannot reach rank 0");
    close(gate[0]), close(gate[1]);
    ranks.check();
}

// Strangers stay or go while rank 0 waits. They are silent, say a part of a hello, or anything. None of them learns the
// job's name, and a wrong hello of the job's own ranks is refused without ending it.
TEST(strangers_at_the_port) {
    const int port = free_port();
    Processes ranks;
    ranks.start_rank(local_place(0, 2, port, "secret"));
    const std::string wrong = hello_by("Secret", 1, 2);
    std::vector<std::string> say = {"GET / HTTP/1.1\r\n\r\n",  "old" + hello_by("secret", 1, 2),
                                    hello_by("secret", 1, 3),  hello_by("secret", 0, 2),
                                    hello_by("secret", -1, 2), std::string(3 << 20, 'x')};
    for (size_t n = 0; n <= wrong.size(); n++) say.push_back(wrong.substr(0, n));
    srand(1);
    for (int i = 0; i < 200; i++) {
        say.push_back(wrong);
        for (int n = rand() % 5; n >= 0; n--) say.back()[rand() % wrong.size()] = static_cast<char>(rand());
    }
    std::vector<int> stay(50);
    for (int& fd : stay) fd = connect_and_say(port, "");
    for (const std::string& text : say) {
        close(connect_and_say(port, text));
        stay.push_back(connect_and_say(port, text));
    }
    ranks.start_rank(local_place(1, 2, port, "secret"));
    ranks.check();
    std::string answers;
    for (int fd : stay) {
        char answer[1000];
        answers.append(answer, std::max<ssize_t>(0, recv(fd, answer, sizeof answer, MSG_DONTWAIT)));
        close(fd);
    }
    CHECK(count_of(answers, "no ") >= 3 && !contains(answers, "secret"));
}

TEST(a_rank_that_dies_while_ranks_meet_may_come_again) {
    const int port = free_port();
    Processes ranks;
    for (int rank : {0, 1}) ranks.start_rank(local_place(rank, 3, port));
    sleep_for(0.3);
    kill(ranks.pids[1], SIGKILL), waitid(P_PID, ranks.pids[1], nullptr, WEXITED | WNOWAIT);
    for (int rank : {1, 2}) ranks.start_rank(local_place(rank, 3, port));
    ranks.check({0, 137, 0, 0});
}

TEST(strangers_may_not_print_control_characters) {
    for (const auto& [answer, says] :
         {std::pair<std::string, std::string>{"220 mail ready\r\n", "is not rank 0 of this job"},
          {"no \x1b[2J\xc2\x9bgo\n", "refused by rank 0: ?[2J??go\n"}}) {
        const int fd = listen_at("127.0.0.1", 0);
        Processes lost;
        lost.start([&] {
            const ssize_t sent = send(accept(fd, nullptr, nullptr), answer.data(), answer.size(), MSG_NOSIGNAL);
            return sleep_for(0.2), sent < 0;
        });
        lost.start_rank(local_place(1, 2, port_of(fd)), {20, 20});
        lost.check({0, 1}, {says});
        close(fd);
    }
    const int port = free_port();
    Processes first;
    first.start_rank(local_place(0, 2, port), {3, 20});
    close(connect_and_say(port, hello_by("", 1, 3, "\x1b[2J")));
    first.check({1}, {"and refused: rank 1 (pid 1 on ?[2J) was started"});
}

// A rank's second connection must say the key that rank 0 has sent it. Otherwise it is nobody's.
TEST(without_the_key_nobody_is_a_rank) {
    const int port = free_port();
    Processes first;
    first.start([=]() -> int {
        Job job(local_place(0, 2, port, "j"));
        std::fprintf(stderr, "met\n");
        _exit(0);  // there is no rank 1 to leave
    });
    const int hello = connect_and_say(port, hello_by("j", 1, 2));
    std::string answer(1000, '\0');
    answer.resize(std::max<ssize_t>(0, recv(hello, answer.data(), answer.size(), 0)));
    const std::string key = answer.substr(answer.size() - 17, 16);
    const int wrong = connect_and_say(port, hello_by(std::string(16, '0'), 1, 2));
    sleep_for(0.5);
    CHECK(!contains(first.text(), "met"));
    const int right = connect_and_say(port, hello_by(key, 1, 2));
    first.check({0}, {"met"});
    for (int fd : {hello, wrong, right}) close(fd);
}

TEST(differences_are_named) {
    ForkedRanks ranks(3, [](Job& job) {
        const std::string lr = job.rank == 2 ? "0.1" : "0.2", data = job.rank == 1 ? "abc" : "abd";
        job.agree({{"--lr", lr}, {"model", "d12"}, {"data", data}});
    });
    ranks.check({1, 1, 1},
                {"--lr: rank 2", "has \"0.1\", rank 0 has \"0.2\"", "data: rank 1", "has \"abc\", rank 0 has \"abd\""});
    CHECK(!contains(ranks.text(), "d12") && count_of(ranks.text(), "\n") == 1);  // once, not by every rank

    ForkedRanks other(2, [](Job& job) {
        job.agree(std::vector<std::pair<std::string, std::string>>(1 + job.rank, {"a", "b"}));
    });
    other.check({1, 1}, {"is another program than rank 0"});
}

// ---------------------------------------------------------------------------------------------------------------------
// Faults and launchers

TEST(a_fault_of_one_rank_ends_all_and_is_named) {
    using Act = void(Job&);
    Act* const dies = [](Job&) { sleep_for(0.2), raise(SIGKILL); };
    Act* const stops = [](Job&) { raise(SIGSTOP); };
    Act* const sleeps = [](Job&) { sleep_for(30); };  // its watching thread still beats
    Act* const throws = [](Job&) { throw UsageError("no such file"); };
    Act* const reports = [](Job& job) { job.also_watch([] { return std::string("network is gone"); }), sleep_for(30); };
    Act* const wait = [](Job& job) { job.barrier(); };
    Act* const leave = [](Job& job) { job.leave(); };
    Act* const wait_on_gpu = [](Job&) { Job::progress()++, sleep_for(30); };
    struct Fault {
        const char* says;
        std::vector<int> victims;
        Act *victim, *others;
        int code, victims_code;
        double silence, progress;
    };
    const Fault faults[] = {{"died", {0, 1, 2}, dies, wait, 1, 137, 30, 0},  // found long before its silence
                            {"died", {0, 1, 2}, dies, leave, 1, 137, 30, 0},
                            {"silent for 2 s", {0, 2}, stops, wait, 1, 137, 2, 0},
                            {"no progress for 2 s", {0, 1}, sleeps, wait, 1, 1, 30, 2},
                            {"no progress for 2 s", {0, 1}, sleeps, wait_on_gpu, 1, 1, 30, 2},
                            {"no such file", {0, 2}, throws, wait, 2, 2, 30, 0},
                            {"network is gone", {0, 1}, reports, wait, 1, 1, 30, 0}};
    for (const Fault& fault : faults)
        for (int victim : fault.victims) {
            const auto body = [&](Job& job) {
                job.barrier();
                job.expect_progress(fault.progress);
                job.barrier();
                (job.rank == victim ? fault.victim : fault.others)(job);
            };
            ForkedRanks ranks(3, body, {60, fault.silence});
            const pid_t pid = ranks.pids[victim];
            wait_for_text(ranks, fault.says);
            if (fault.victim == stops) sleep_for(0.5), kill(pid, SIGKILL);
            std::vector<int> codes(3, fault.code);
            codes[victim] = fault.victims_code;
            ranks.check(codes, {fault.says, format("rank %d (pid %d on", victim, static_cast<int>(pid))});
            const bool first_is_gone = victim == 0 && fault.victims_code == 137;  // then each of the others says it
            CHECK(count_of(ranks.text(), "rank ") == (first_is_gone ? 2 : 1));
            if (test::failed_checks()) return;  // the others would take long
        }
}

TEST(launchers_variables) {
    const std::string torchrun =
        "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=n1 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=x "
        "TORCHELASTIC_RESTART_COUNT=2 ";
    const std::string slurm = "SLURM_PROCID=2 SLURM_LOCALID=2 SLURM_JOB_ID=77 SLURM_STEP_ID=1 MASTER_PORT=5001 ";
    const std::pair<std::string, const char*> cases[] = {
        {"", "rank 0 of 1, -1 here"},
        {torchrun, "rank 3 of 8, 1 here, at n1 29501, job x.2, fd -1"},  // torchrun itself listens on 29500
        {torchrun + "GPT2_JOB=g GPT2_LISTEN_FD=7", "rank 3 of 8, 1 here, at n1 29500, job g.x.2, fd -1"},
        {torchrun + "GPT2_JOB=secret", "at n1 29501, job secret.x.2, fd -1"},
        {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=1 GPT2_JOB=g", "at n1 1, job g, fd -1"},
        {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=1 GPT2_JOB=g GPT2_LISTEN_FD=7",
         "rank 0 of 2, -1 here, at n1 1, job g, fd 7"},
        {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 PMIX_NAMESPACE=p7 "
         "MASTER_ADDR=n2 MASTER_PORT=5000",
         "rank 1 of 2, 0 here, at n2 5000, job p7,"},
        {"PMI_RANK=5 PMI_SIZE=6 MPI_LOCALRANKID=1 MASTER_ADDR=n4 MASTER_PORT=5002 RANK= WORLD_SIZE=",
         "rank 5 of 6, 1 here, at n4 5002, job ,"},  // empty means not set
        {slurm + "SLURM_STEP_NUM_TASKS=4 MASTER_ADDR=n3", "rank 2 of 4, 2 here, at n3 5001, job 77.1,"},
        {slurm + "MASTER_ADDR=n3", "rank 0 of 1,"},  // in an allocation, not a step
        {slurm + "SLURM_STEP_NUM_TASKS=4",
         "set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there; on one"},
        {"RANK=4 WORLD_SIZE=4", "RANK: \"4\""},
        {"RANK=3x WORLD_SIZE=4", "RANK: \"3x\""},
        {"RANK=0 WORLD_SIZE=1", "rank 0 of 1,"},
    };
    for (const auto& [environment, says] : cases) {
        std::istringstream words(environment);
        std::vector<std::string> variables(std::istream_iterator<std::string>(words), {});
        for (std::string& v : variables) putenv(v.data());
        std::string got;
        try {
            const Place p = place_from_environment();
            got = format("rank %d of %d, %d here, at %s %d, job %s, fd %d", p.rank, p.size, p.local_rank,
                         p.address.c_str(), p.port, p.job.c_str(), p.listen_fd);
        } catch (const UsageError& e) {
            got = e.what();
        }
        if (!contains(got, says)) test::report(__FILE__, __LINE__, environment + ": " + got + ", expected " + says);
        for (const std::string& v : variables) unsetenv(v.substr(0, v.find('=')).c_str());
    }
}

TEST_MAIN
