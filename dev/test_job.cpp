// Tests the processes of a job without a model: meeting, exchanging, the collectives of the CPU, and every way in which
// a rank can be missing, wrong, dead or stuck. Ranks are forked children, and what they write to stderr is read back.
//
// Run: ./dev/test_job [part of a test's name]
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "dev/ranks.h"
#include "dev/test.h"
#include "layers/comm/reference_comm.h"

namespace {

// A connection to the port that has sent `text`, or -1 if nobody listens.
int connect_and_say(int port, const std::string& text) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in a = {};
    a.sin_family = AF_INET;
    a.sin_port = htons(static_cast<uint16_t>(port));
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof a)) return close(fd), -1;
    if (send(fd, text.data(), text.size(), MSG_NOSIGNAL) != ssize_t(text.size())) throw Error("cannot send");
    return fd;
}

// Does the same as soon as a process that was started before listens there.
int connect_when_it_listens(int port) {
    for (int i = 0; i < 1000; i++, sleep_for(0.01))
        if (const int fd = connect_and_say(port, ""); fd >= 0) return fd;
    throw Error("nobody listens");
}

// Values that differ from rank to rank and whose sums round.
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
    const int size = job.size, rank = job.rank;
    for (const size_t n : {1, 2, 7, 64, 1001}) {
        std::vector<A> x = values<A>(rank, n);
        comm.all_reduce(x.data(), n);
        CHECK(x == sum_of_values<A>(size, n));  // bit for bit, because ranks are summed in order

        const std::vector<A> parts = values<A>(rank, size * n), sum = sum_of_values<A>(size, size * n);
        std::vector<A> own(n, A(NAN));
        comm.reduce_scatter(own.data(), parts.data(), n);
        CHECK(std::equal(own.begin(), own.end(), sum.begin() + rank * n));

        std::vector<A> all(size * n, A(NAN));
        std::copy_n(values<A>(rank, n).data(), n, all.data() + rank * n);
        comm.all_gather(all.data(), n);
        for (int r = 0; r < size; r++)
            CHECK(std::equal(all.begin() + r * n, all.begin() + (r + 1) * n, values<A>(r, n).begin()));

        const int next = (rank + 1) % size, before = (rank + size - 1) % size;
        const auto sent_by = [&](int r) { return n - r % 2 * (n / 2); };
        std::vector<A> got(sent_by(before), A(NAN));
        comm.send_recv(next, values<A>(rank, n).data(), sent_by(rank), before, got.data(), got.size());
        CHECK(std::equal(got.begin(), got.end(), values<A>(before, n).begin()));

        const std::vector<A> mine = values<A>(rank, 3 * n), theirs = values<A>(before, 3 * n);
        std::vector<A> packed(2 * n, A(NAN)), rows(2 * n, A(NAN));  // two of every three elements
        comm.send_recv_rows(next, packed.data(), mine.data(), 3, 2, n, before, rows.data());
        for (size_t i = 0; i < rows.size(); i++) CHECK(rows[i] == theirs[i / 2 * 3 + i % 2]);
    }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Meeting and exchanging

TEST(alone_every_call_returns) {
    Job job;
    CHECK(job.rank == 0 && job.size == 1);
    job.barrier();
    job.agree({{"a", "b"}});
    std::vector<double> x = {1, 2};
    job.sum(x);
    CHECK(x == (std::vector<double>{1, 2}));
    CHECK(job.all_gather(5) == std::vector<int>{5} &&
          job.all_gather(std::string("x")) == std::vector<std::string>{"x"});
    CHECK_ERROR(job.guard([]() -> int { throw Error("through"); }), "through");
    check_collectives<float>(job);
    job.leave();
}

TEST(ranks_exchange) {
    for (int size : {2, 3, 5}) {
        ForkedRanks ranks(size, [](Job& job) {
            CHECK(job.local_rank == job.rank && job.local_size == job.size);
            const std::vector<int> all = job.all_gather(10 * job.rank);
            for (int r = 0; r < job.size; r++) CHECK(all[r] == 10 * r);
            const std::vector<std::string> texts =
                job.all_gather(std::string(job.rank * 1000, 'x'));  // none of rank 0's
            for (int r = 0; r < job.size; r++) CHECK(texts[r] == std::string(r * 1000, 'x'));
            std::vector<int> from_first(1 << 20, job.rank == 0 ? 7 : 0);  // more than a socket holds
            job.broadcast(from_first.data(), from_first.size());
            CHECK(from_first.front() == 7 && from_first.back() == 7);
            std::vector<double> x = values<double>(job.rank, 100);
            job.sum(x);
            CHECK(x == sum_of_values<double>(job.size, 100));  // bit for bit, because ranks are summed in order
            job.agree({{"model", "d12"}, {"lr", "1"}});
            job.leave();
            return 0;
        });
        CHECK_ENDED_WELL(ranks);
    }
}

TEST(collectives) {
    for (int size : {1, 2, 3, 4}) {
        ForkedRanks ranks(size, [](Job& job) {
            check_collectives<float>(job);
            check_collectives<double>(job);
            job.leave();
            return 0;
        });
        CHECK_ENDED_WELL(ranks);
    }
}

// GPUs map each other's memory, so a rank must leave shared memory before its job ends. A rank that has not is aborted.
TEST(shared_memory_is_left_before_the_end) {
    for (bool orderly : {true, false}) {
        ForkedRanks ranks(2, [=](Job& job) {
            CpuComm all(Cpu(1), job), alone(all, job.rank, 1);
            job.barrier();
            const auto begin = Clock::now();
            if (job.rank == 1) sleep_for(0.4);
            for (CpuComm* comm : {&all, &alone}) comm->share(&all, 1);
            CHECK(seconds_since(begin) > 0.2);  // it waits for all
            if (job.rank == 0) all.share(nullptr, 0), alone.share(nullptr, 0);
            if (job.rank == 1) all.share(nullptr, 0), alone.share(orderly ? nullptr : &all, 1);
            job.leave();
            CHECK_ERROR(job.barrier(), "has left its job");
            return 0;
        });
        CHECK((ranks.wait() == std::vector<int>{0, orderly ? 0 : 128 + SIGABRT}));
        CHECK(orderly || contains(ranks.text(), "while it shares memory"));
    }
}

TEST(ranks_may_come_in_any_order_and_leave_at_any_time) {
    const int port = free_port();
    Processes ranks;
    for (int rank = 2; rank >= 0; rank--)
        ranks.start([=] {
            sleep_for(0.3 * (2 - rank));
            Job job({rank, 3, 2 - rank, "localhost", port, "", -1}, kQuick);
            CHECK(job.local_rank == 2 - rank);  // as the launcher says
            CHECK(job.all_gather(rank)[2] == 2);
            job.leave();
            sleep_for(rank == 1 ? 2.5 : 0);  // longer than a silence
            return 0;
        });
    CHECK_ENDED_WELL(ranks);
}

// Host names say that rank 1 is on another machine.
TEST(machines_are_told_apart) {
    const auto move = [] { return unshare(CLONE_NEWUSER | CLONE_NEWUTS) == 0 && sethostname("elsewhere", 9) == 0; };
    Processes probe;
    probe.start([&] { return move() ? 0 : 77; });
    if (probe.wait()[0] == 77) SKIP("no machine names of our own here");
    const int port = free_port();
    Processes ranks;
    for (int rank = 0; rank < 3; rank++)
        ranks.start([=] {
            CHECK(rank != 1 || move());
            Job job({rank, 3, -1, "127.0.0.1", port, "", -1}, kQuick);
            CHECK(job.local_rank == rank / 2 && job.local_size == (rank == 1 ? 1 : 2));
            job.leave();
            return 0;
        });
    CHECK_ENDED_WELL(ranks);
}

// Rank 1 waits for longer than its patience, because each of the others comes within its own.
TEST(the_last_rank_may_come_late) {
    const int port = free_port();
    Processes ranks;
    const double comes[3] = {2, 0, 5};
    for (int rank = 0; rank < 3; rank++)
        ranks.start([=] {
            sleep_for(comes[rank]);
            Job job({rank, 3, -1, "localhost", port, "", -1}, {4, 2});
            job.leave();
            return 0;
        });
    CHECK_ENDED_WELL(ranks);
}

TEST(a_rank_that_works_long_is_not_missed) {
    ForkedRanks ranks(2, [](Job& job) {
        job.expect_progress(2);
        for (int i = 0; i < 8 && job.rank == 1; i++) sleep_for(0.5), Job::progress()++;  // with signs of life
        job.barrier();
        job.expect_progress(0);
        if (job.rank == 0) sleep_for(3);  // nothing is expected
        job.barrier();
        job.leave();
        return 0;
    });
    CHECK_ENDED_WELL(ranks);
}

// Every beat may find a step at the same point. That is no standstill.
TEST(many_equal_steps_are_progress) {
    ForkedRanks ranks(2, [](Job& job) {
        for (int step = 0; step < 40; step++) {
            job.expect_progress(2);
            Job::progress()++;
            sleep_for(0.1);
            job.expect_progress(0);
            job.barrier();
        }
        job.leave();
        return 0;
    });
    CHECK_ENDED_WELL(ranks);
}

// ---------------------------------------------------------------------------------------------------------------------
// Wrong and missing ranks

TEST(missing_ranks_are_named) {
    const int port = free_port();
    Processes ranks;
    for (int rank : {0, 2})
        ranks.start([=] {
            Job job({rank, 4, -1, "127.0.0.1", port, "", -1}, {2, 1});
            return 0;
        });
    CHECK((ranks.wait() == std::vector<int>{1, 1}));
    CHECK(contains(ranks.text(), "of 4 ranks these did not come to port") && contains(ranks.text(), ": 1, 3;"));
    CHECK_ERROR(Job({1, 2, -1, "127.0.0.1", port, "", -1}, Patience{0.2, 1}), "cannot reach rank 0");
}

TEST(wrong_ranks_are_refused_on_both_sides) {
    struct Case {
        Place first, second;
        const char* why;
    };
    const int port = free_port();
    for (const Case& c :
         {Case{{0, 2, -1, "127.0.0.1", port, "", -1}, {2, 3, -1, "127.0.0.1", port, "", -1}, "as one of 3 ranks"},
          Case{{0, 2, -1, "127.0.0.1", port, "", -1}, {1, 5, -1, "127.0.0.1", port, "", -1}, "as one of 5 ranks"}}) {
        Processes ranks;
        ranks.start([&] { return Job(c.first, kQuick), 0; });
        ranks.start([&] { return Job(c.second, kQuick), 0; });
        CHECK((ranks.wait() == std::vector<int>{1, 1}));
        CHECK(contains(ranks.text(), c.why));
    }
    Processes ranks;
    for (int rank : {0, 1, 1}) ranks.start([=] { return Job({rank, 3, -1, "127.0.0.1", port, "", -1}, kQuick), 0; });
    CHECK((ranks.wait() == std::vector<int>{1, 1, 1}));
    CHECK(contains(ranks.text(), "two processes have the same rank"));
}

// If the address is this machine's alone, ranks listen only for this machine.
TEST(nobody_listens_to_other_machines_without_need) {
    const auto listeners = [](int pid) {  // local addresses of the sockets in which a process listens, by /proc
        std::vector<std::string> addresses;
        std::set<std::string> own;
        const std::string fds = format("/proc/%d/fd", pid);
        for (const auto& fd : std::filesystem::directory_iterator(fds)) {
            std::error_code gone;
            own.insert(std::filesystem::read_symlink(fd.path(), gone).string());
        }
        for (const char* family : {"tcp", "tcp6"}) {
            std::ifstream table(format("/proc/net/%s", family));
            std::string line, at, local, remote, state, skipped, inode;
            for (std::getline(table, line); std::getline(table, line);) {
                std::istringstream fields(line);
                fields >> at >> local >> remote >> state;
                for (int i = 0; i < 6; i++) fields >> inode;
                if (state == "0A" && own.count("socket:[" + inode + "]"))
                    addresses.push_back(local.substr(0, local.find(':')));
            }
        }
        return addresses;
    };
    for (const char* address : {"127.0.0.1", "localhost"}) {
        const int port = free_port();
        Processes ranks;
        for (int rank : {0, 1})
            ranks.start([=] { return Job({rank, 3, -1, address, port, "", -1}, Patience{1.5, 1}), 0; });
        sleep_for(0.7);
        for (const pid_t pid : ranks.pids) CHECK(listeners(pid) == std::vector<std::string>{"0100007F"});
        CHECK((ranks.wait() == std::vector<int>{1, 1}));
    }
}

// A new job neither joins nor disturbs an earlier one that still waits for ranks.
TEST(an_old_job_is_never_joined) {
    const int port = free_port();
    Processes old, young;
    const auto start = [=](Processes& ranks, int rank, const char* name) {
        ranks.start([=] {
            Job job({rank, 2, -1, "127.0.0.1", port, name, -1}, kQuick);
            job.leave();
            return 0;
        });
    };
    start(old, 0, "old");
    close(connect_when_it_listens(port));
    start(young, 1, "young");
    start(young, 0, "young");
    CHECK((young.wait() == std::vector<int>{1, 1}));
    CHECK(contains(young.text(), "is that of another job (\"old\", this one is \"young\")"));
    CHECK(contains(young.text(), "cannot listen on port") && contains(young.text(), "MASTER_PORT"));
    start(old, 1, "old");
    CHECK_ENDED_WELL(old);
}

TEST(a_running_job_cannot_be_joined) {
    int gate[2];  // closed until the parent closes its end
    CHECK(pipe(gate) == 0);
    ForkedRanks ranks(2, [=](Job& job) {
        job.barrier();
        std::fprintf(stderr, "met\n");
        char byte;
        close(gate[1]);
        if (read(gate[0], &byte, 1) != 0) return 1;
        job.leave();
        return 0;
    });
    for (int i = 0; i < 1000 && !contains(ranks.text(), "met"); i++) sleep_for(0.01);
    CHECK(connect_and_say(ranks.port, "") == -1);
    CHECK_ERROR(Job({1, 2, -1, "127.0.0.1", ranks.port, "a job", -1}, Patience{0.3, 1}), "cannot reach rank 0");
    close(gate[0]), close(gate[1]);
    CHECK_ENDED_WELL(ranks);
}

TEST(strangers_at_the_port) {
    const int port = free_port();
    Processes ranks;
    ranks.start([=] {
        Job job({0, 2, -1, "127.0.0.1", port, "", -1}, {10, 2});
        job.leave();
        return 0;
    });
    const int gone = connect_when_it_listens(port), web = connect_and_say(port, "GET / HTTP/1.1\r\n\r\n");
    close(gone);
    ranks.start([=] {
        Job job({1, 2, -1, "127.0.0.1", port, "", -1}, {10, 2});
        job.leave();
        return 0;
    });
    CHECK_ENDED_WELL(ranks);
    close(web);

    int fd = -1;  // something else listens where rank 0 should be
    const int other = free_port(&fd);
    Processes lost;
    lost.start([=] {
        int taken = -1;
        for (int i = 0; i < 1000 && taken < 0; i++) sleep_for(0.01), taken = accept(fd, nullptr, nullptr);
        return send(taken, "220 mail.example.com ESMTP ready\r\n", 34, MSG_NOSIGNAL) < 0;
    });
    lost.start([=] { return Job({1, 2, -1, "127.0.0.1", other, "", -1}, {1, 1}), 0; });
    CHECK((lost.wait() == std::vector<int>{0, 1}));
    CHECK(contains(lost.text(), "is not rank 0 of this job"));
    close(fd);
}

// A rank's second connection must say the key that rank 0 has sent it. Otherwise it is nobody's.
TEST(without_the_key_nobody_is_a_rank) {
    const int port = free_port();
    Processes first;
    first.start([=]() -> int {
        Job job({0, 2, -1, "127.0.0.1", port, "j", -1}, kQuick);
        std::fprintf(stderr, "met\n");
        _exit(0);  // there is no rank 1 to leave
    });
    const auto hello_by = [](const std::string& name) {
        const std::string body = name + "\n1 2 1 1 here";
        return format("gpt2job1%08zx", body.size()) + body;
    };
    close(connect_when_it_listens(port));
    const int hello = connect_and_say(port, hello_by("j"));
    std::string answer(8 + 8 + 4 + 16, '\0');  // magic, length, "yes" and the key
    if (recv(hello, answer.data(), answer.size(), MSG_WAITALL) != ssize_t(answer.size())) throw Error("no answer");
    const int wrong = connect_and_say(port, hello_by(std::string(16, '0')));
    sleep_for(0.5);
    CHECK(!contains(first.text(), "met"));
    const int right = connect_and_say(port, hello_by(answer.substr(20)));
    CHECK(first.wait() == std::vector<int>{0});
    CHECK(contains(first.text(), "met"));
    for (int fd : {hello, wrong, right}) close(fd);
}

TEST(differences_are_named) {
    ForkedRanks ranks(3, [](Job& job) {
        const std::string lr = job.rank == 2 ? "0.1" : "0.2", data = job.rank == 1 ? "abc" : "abd";
        job.agree({{"--lr", lr}, {"model", "d12"}, {"data", data}});
        return 0;
    });
    CHECK((ranks.wait() == std::vector<int>{1, 1, 1}));
    const std::string text = ranks.text();
    CHECK(contains(text, "--lr: rank 2") && contains(text, "has \"0.1\", rank 0 has \"0.2\""));
    CHECK(contains(text, "data: rank 1") && contains(text, "has \"abc\", rank 0 has \"abd\"") &&
          !contains(text, "d12"));
    CHECK(std::count(text.begin(), text.end(), '\n') == 1);  // once, not by every rank

    ForkedRanks other(2, [](Job& job) {
        job.agree(std::vector<std::pair<std::string, std::string>>(1 + job.rank, {"a", "b"}));
        return 0;
    });
    CHECK((other.wait() == std::vector<int>{1, 1}));
    CHECK(contains(other.text(), "is another program than rank 0"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Faults, in which the others wait in a collective that will never end

TEST(a_death_ends_all_and_is_named) {
    for (int i = 0; i < 6; i++) {
        const int victim = i % 3;
        const bool leaving = i >= 3;  // the others have done their work, but not the victim
        ForkedRanks ranks(3,
                    [=](Job& job) {
                        job.barrier();
                        if (job.rank == victim) sleep_for(0.2), raise(SIGKILL);
                        leaving ? job.leave() : job.barrier();
                        return 0;
                    },
                    {10, 30});
        const auto begin = Clock::now();
        const std::vector<int> codes = ranks.wait();
        for (int r = 0; r < 3; r++) CHECK(codes[r] == (r == victim ? 137 : 1));
        CHECK(seconds_since(begin) < 10);  // so it was not found by its silence
        CHECK(contains(ranks.text(), format("rank %d (pid ", victim)) && contains(ranks.text(), "died"));
    }
}

TEST(a_process_that_stands_still_ends_all_and_is_named) {
    for (int victim : {0, 2}) {
        ForkedRanks ranks(3, [=](Job& job) {
            job.barrier();
            if (job.rank == victim) raise(SIGSTOP);
            job.barrier();
            return 0;
        });
        std::vector<int> codes;
        for (int waited = 0; waited < 100 && !contains(ranks.text(), "hangs"); waited++) sleep_for(0.1);
        sleep_for(0.5);
        const pid_t stopped = ranks.pids[victim];
        kill(stopped, SIGKILL);
        codes = ranks.wait(3);
        for (int r = 0; r < 3; r++) CHECK(codes[r] == (r == victim ? 137 : 1));
        CHECK(contains(ranks.text(), format("rank %d (pid %d on", victim, static_cast<int>(stopped))) &&
              contains(ranks.text(), "silent for 2 s"));
    }
}

// The rank's watching thread still beats, but its main thread makes no progress. The others wait on the host or on
// their GPUs.
TEST(a_rank_without_progress_ends_all_and_is_named) {
    for (bool on_host : {true, false})
        for (int victim : {0, 1}) {
            ForkedRanks ranks(3, [=](Job& job) {
                job.barrier();
                job.expect_progress(2);
                job.barrier();
                while (job.rank == victim) sleep_for(1);
                if (on_host) job.barrier();
                Job::progress()++;
                for (;;) sleep_for(1);
                return 0;
            });
            CHECK((ranks.wait() == std::vector<int>{1, 1, 1}));
            CHECK(contains(ranks.text(), format("no progress for 2 s: rank %d (pid", victim)));
            CHECK(!contains(ranks.text(), format("rank %d (pid", 2)));
        }
}

TEST(an_error_of_one_rank_ends_all_with_its_text_and_code) {
    for (int victim : {0, 2}) {
        ForkedRanks ranks(3, [=](Job& job) {
            job.barrier();
            if (job.rank == victim) throw UsageError("no such file");
            job.barrier();
            return 0;
        });
        CHECK((ranks.wait() == std::vector<int>{2, 2, 2}));
        CHECK(contains(ranks.text(), format("rank %d (pid ", victim)) && contains(ranks.text(), "no such file"));
    }
}

TEST(what_the_backend_reports_ends_all) {
    ForkedRanks ranks(2, [](Job& job) {
        if (job.rank == 1) job.also_watch([] { return std::string("the network is gone"); });
        if (job.rank == 0) job.barrier();
        sleep_for(10);
        return 0;
    });
    CHECK((ranks.wait() == std::vector<int>{1, 1}));
    const std::string text = ranks.text();
    CHECK(contains(text, "rank 1 (pid ") && contains(text, "the network is gone"));
    CHECK(std::count(text.begin(), text.end(), '\n') == 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

TEST(launchers_variables) {
    const std::map<std::string, std::string> torchrun = {{"RANK", "3"},
                                                         {"WORLD_SIZE", "8"},
                                                         {"LOCAL_RANK", "1"},
                                                         {"MASTER_ADDR", "n1"},
                                                         {"MASTER_PORT", "29500"},
                                                         {"TORCHELASTIC_RUN_ID", "x"},
                                                         {"TORCHELASTIC_RESTART_COUNT", "2"}};
    const std::map<std::string, std::string> mpirun = {
        {"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
        {"PMIX_NAMESPACE", "p7"},      {"MASTER_ADDR", "n2"},         {"MASTER_PORT", "5000"}};
    const std::map<std::string, std::string> srun = {
        {"SLURM_PROCID", "2"},  {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "2"}, {"SLURM_JOB_ID", "77"},
        {"SLURM_STEP_ID", "1"}, {"MASTER_ADDR", "n3"},         {"MASTER_PORT", "5001"}};
    const std::map<std::string, std::string> mpich = {{"PMI_RANK", "5"},        {"PMI_SIZE", "6"},
                                                      {"MPI_LOCALRANKID", "1"}, {"MASTER_ADDR", "n4"},
                                                      {"MASTER_PORT", "5002"},  {"RANK", ""},
                                                      {"WORLD_SIZE", ""}};  // empty means not set
    const auto in = [](std::map<std::string, std::string> variables, const std::string& drop, auto body) {
        variables.erase(drop);
        for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
        body();
        for (const auto& [name, value] : variables) unsetenv(name.c_str());
    };
    CHECK(place_from_environment().size == 1);
    in(torchrun, "", [] {
        const Place p = place_from_environment();
        CHECK(p.rank == 3 && p.size == 8 && p.local_rank == 1 && p.address == "n1" && p.job == "x.2");
        CHECK(p.port == 29501);  // torchrun itself listens on 29500
    });
    in(mpirun, "", [] {
        const Place p = place_from_environment();
        CHECK(p.rank == 1 && p.size == 2 && p.local_rank == 0 && p.port == 5000 && p.job == "p7");
    });
    in(srun, "", [] {
        const Place p = place_from_environment();
        CHECK(p.rank == 2 && p.size == 4 && p.local_rank == 2 && p.port == 5001 && p.job == "77.1");
    });
    in(mpich, "", [] {
        const Place p = place_from_environment();
        CHECK(p.rank == 5 && p.size == 6 && p.local_rank == 1 && p.port == 5002 && p.job.empty());
    });
    in(srun, "SLURM_STEP_NUM_TASKS",
       [] { CHECK(place_from_environment().size == 1); });  // in an allocation, not a step
    in(srun, "MASTER_ADDR", [] { CHECK_ERROR(place_from_environment(), "set MASTER_ADDR"); });
    in({{"RANK", "4"}, {"WORLD_SIZE", "4"}}, "", [] { CHECK_ERROR(place_from_environment(), "RANK: \"4\""); });
    in({{"RANK", "x"}, {"WORLD_SIZE", "4"}}, "", [] { CHECK_ERROR(place_from_environment(), "RANK: \"x\""); });
    in({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, "", [] { CHECK(place_from_environment().size == 1); });
}

TEST_MAIN
