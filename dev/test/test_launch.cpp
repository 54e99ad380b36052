// Tests how ranks start, find each other and end, without a model. Launchers set their variables,
// --gpus starts processes, ranks are missing or wrong in every way, strangers come to the port, and
// the watchdog ends what hangs.
//
// Run: ./dev/test_launch [part of a test's name]
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <termios.h>

#include <csignal>
#include <filesystem>
#include <iterator>
#include <sstream>

#include "dev/test/processes.h"
#include "parallel/watchdog.h"
#include "run/process.h"

// While this is true the system has no more threads.
static bool no_threads = false;
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
    using Create = decltype(&pthread_create);
    static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
    return no_threads ? EAGAIN : create(thread, attributes, start, argument);
}

namespace {

RankInfo rank_info(int rank, int size, int port, const std::string& job = "job") {
    return {.rank = rank, .size = size, .port = port, .address = "127.0.0.1", .job = job};
}
sockaddr_in local_address(int port, const char* host = "127.0.0.1") {
    sockaddr_in a = {};
    a.sin_family = AF_INET;
    a.sin_port = htons(static_cast<uint16_t>(port));
    a.sin_addr.s_addr = inet_addr(host);
    return a;
}
// A connection that has sent `text`, or -1 if nobody listens there within so many seconds.
int connect_and_say(int port, const std::string& text, double timeout = 20,
                    const char* host = "127.0.0.1") {
    const sockaddr_in a = local_address(port, host);
    for (const double deadline = now() + timeout;; sleep_for(0.01)) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, reinterpret_cast<const sockaddr*>(&a), sizeof a) == 0) {
            send(fd, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
            return fd;
        }
        close(fd);
        if (now() > deadline)
            return -1;
    }
}
const std::string kNcclId("\0an id\n\0with\0\0zeros\0", 20);

// Takes part in a rendezvous as this rank and checks that it gets the id of rank 0.
int check_rendezvous(const RankInfo& self, const Fields& fields = {}, double timeout = 20) {
    CHECK(rendezvous(self, fields, self.rank == 0 ? kNcclId : "", timeout) == kNcclId);
    return 0;
}

// What rank_from_environment() says with these variables alone.
std::string launched_with(const std::string& environment) {
    std::istringstream words(environment);
    std::vector<std::string> variables(std::istream_iterator<std::string>(words), {});
    for (std::string& v : variables)
        putenv(v.data());
    std::string got;
    try {
        const RankInfo self = rank_from_environment();
        got = format("rank %d of %d, %d of %d here, at %s %d, job %s;", self.rank, self.size,
                     self.local_rank, self.local_size, self.address.c_str(), self.port,
                     self.job.c_str());
    } catch (const UsageError& e) {
        got = e.what();
    }
    for (const std::string& v : variables)
        unsetenv(v.substr(0, v.find('=')).c_str());
    return got;
}

// A rank of --gpus, which is this program with other arguments.
volatile std::sig_atomic_t signals = 0;
int child(const std::string& act) {
    const RankInfo self = rank_from_environment();
    if (act == "rendezvous")
        return check_rendezvous(self) + test::failed_checks() + (self.local_rank != self.rank);
    if (act == "exit" && self.rank == 1)
        return 3;
    if (act == "die") {
        sleep_for(self.rank);
        if (self.rank == 1)
            raise(SIGKILL);
        return 4 + self.rank;
    }
    if (act == "print")
        return std::puts("printed") < 0;
    if (act == "count")
        std::signal(SIGINT, [](int) { signals = signals + 1; });
    std::printf("ready %d\n", static_cast<int>(getpid()));
    std::fflush(stdout);
    for (int i = 0; i < 300 && !signals; i++)
        sleep_for(0.1);
    sleep_for(0.5);
    if (!signals)
        std::puts("not ended");
    return signals == 1 ? 0 : 4;
}
// A process with the program's handlers, which ends by a signal or not at all.
int process(const std::string& act) {
    if (act == "end")
        return 0;
    prepare_process();
    if (act == "training")
        catch_signals();

    // Its number outside of its container, where /proc comes from.
    std::printf("ready %s\n", std::filesystem::read_symlink("/proc/self").c_str());
    std::fflush(stdout);
    while (!g_signal)
        sleep_for(0.01);
    std::puts("first");
    std::fflush(stdout);
    for (;;)
        pause();
}
int launch_here(const std::string& act) {
    setenv("MASTER_ADDR", "nowhere", 1);  // of an earlier job
    std::string words[] = {"test_launch", "--child", act};
    char* argv[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
    return launch_ranks(3, argv);
}
void launch(Processes& parent, const std::string& act) {
    parent.start([&] {
        setpgid(0, 0);
        return launch_here(act);
    });
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launchers

TEST(launchers_variables) {
    const std::string torchrun =
        "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=29500 "
        "TORCHELASTIC_RUN_ID=x "
        "TORCHELASTIC_RESTART_COUNT=2 ";
    const std::string mpirun =
        "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 ";
    const std::string slurm =
        "SLURM_PROCID=2 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=3(x2) SLURM_JOB_ID=77 "
        "SLURM_STEP_ID=1 ";
    const std::string intel = "PMI_RANK=1 PMI_SIZE=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=";
    const std::pair<std::string, std::string> cases[] = {
        {"MASTER_PORT=29500", "rank 0 of 1, 0 of 1 here"},
        {torchrun,
         "rank 3 of 8, 1 of 4 here, at n1 29501, job x.2;"},  // torchrun itself listens on 29500
        {torchrun + "GPT2_JOB=secret SLURM_JOB_ID=5", "at n1 29501, job secret.x.2;"},
        {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=1 GPT2_JOB=g",
         "rank 0 of 2, 0 of 1 here, at n1 1, job g;"},
        {mpirun + "PMIX_NAMESPACE=p7 MASTER_ADDR=n2 MASTER_PORT=5000",
         "rank 1 of 2, 0 of 1 here, at n2 5000, job p7;"},
        {mpirun + "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=p7",
         "rank 1 of 2, 0 of 2 here, at 127.0.0.1 2"},
        {mpirun + "OMPI_COMM_WORLD_LOCAL_SIZE=1",
         "set MASTER_ADDR to rank 0's host"},  // several machines
        {mpirun, "set MASTER_ADDR to rank 0's host"},
        {mpirun + "OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_PORT=1", "set MASTER_ADDR to rank 0's host"},
        {mpirun + "OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=n1", "MASTER_PORT is \"\""},
        {intel + "2 MASTER_ADDR=n4 MASTER_PORT=5002 RANK= WORLD_SIZE=",
         "rank 1 of 6, 1 of 2 here, at n4 5002, job ;"},
        {intel + "6 PMI_JOBID=33", "job 33;"},
        {intel + "6", format("job %d;", getppid())},
        {slurm + "SLURM_STEP_NUM_TASKS=6 MASTER_ADDR=n3 MASTER_PORT=5001",
         "rank 2 of 6, 2 of 3 here, at n3 5001, job 77.1;"},
        {slurm + "MASTER_ADDR=n3", "rank 0 of 1,"},  // in an allocation, not a step
        {slurm + "SLURM_STEP_NUM_TASKS=3", "rank 2 of 3, 2 of 3 here, at 127.0.0.1 2"},
        {slurm + "SLURM_STEP_NUM_TASKS=1 PMI_RANK=2 PMI_SIZE=4 MASTER_ADDR=n3 MASTER_PORT=1",
         "rank 2 of 4, 2 of 1 here"},
        {"RANK=4 WORLD_SIZE=4", "RANK is \"4\""},
        {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=2", " LOCAL_RANK is \"2\""},
        {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=n MASTER_PORT=65536", "MASTER_PORT is \"65536\""},
        {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=n MASTER_PORT=65535 TORCHELASTIC_RUN_ID=x",
         "MASTER_PORT is \"65535\""},
        {"WORLD_SIZE=2", " RANK is \"\""},  // which is missing
        {"RANK=0", " WORLD_SIZE is \"\""},
        {"RANK=0 WORLD_SIZE=0", "WORLD_SIZE is \"0\""},
        {"RANK=1x WORLD_SIZE=2", " RANK is \"1x\""},
        {"RANK=-1 WORLD_SIZE=2", " RANK is \"-1\""},
        {"SLURM_PROCID=2 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=3,2 SLURM_STEP_NUM_TASKS=5 "
         "MASTER_ADDR=n3 MASTER_PORT=5001",
         "rank 2 of 5, 2 of 3 here"},
    };
    for (const auto& [environment, says] : cases) {
        const std::string got = launched_with(environment);
        if (count_of(got, says) == 0)
            test::report(__FILE__, __LINE__, environment + ": " + got + ", expected " + says);
    }
    const std::string local = mpirun + "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_MCA_ess_base_jobid=";
    const std::string seven = launched_with(local + "7");
    const std::string eight = launched_with(local + "8");
    CHECK(seven.substr(0, seven.find(", job")) != eight.substr(0, eight.find(", job")));
}

TEST(gpus_starts_and_ends_ranks) {
    const struct {
        std::string act;
        int signal, code;
        std::vector<std::string> says;
        int lines;  // of the parent
    } cases[] = {{"rendezvous", 0, 0, {}, 0},
                 {"exit", 0, 3, {": rank 1 (pid ", ") ended with exit code 3\n"}, 1},
                 {"die",
                  0,
                  137,
                  {") ended with exit code 4\n", ": rank 1 (pid ", ") was killed by signal 9 ("},
                  2},
                 {"count", SIGINT, 0, {}, 0},
                 {"sleep", SIGALRM, 128 + SIGALRM, {}, 0},  // as with any process
                 {"sleep", SIGTERM, 143, {") was killed by signal 15 ("}, 1}};
    for (const auto& c : cases) {
        Processes parent;
        launch(parent, c.act);
        if (c.signal)
            parent.wait_for("ready", 3);
        if (c.signal)
            kill(-parent.pids[0], c.signal);  // as a terminal does, to the group
        parent.check({c.code}, c.says);
        CHECK(count_of(parent.text(), "not ended") == 0);
        CHECK(count_of(parent.text(), "train_gpt2cu: ") == c.lines);
    }
}

TEST(ranks_die_with_their_parent) {
    Processes parent;
    launch(parent, "sleep");
    parent.wait_for("ready", 3);
    kill(parent.pids[0], SIGKILL);
    parent.check({137});
    std::istringstream words(parent.text());
    int pid = 0;
    int found = 0;
    int alive = 3;
    std::vector<int> pids;
    for (std::string word; words >> word >> pid; found++)
        pids.push_back(pid);
    for (int i = 0; i < 500 && alive > 0; i++, sleep_for(0.01)) {
        alive = 0;
        for (int p : pids)
            alive += kill(p, 0) == 0;
    }
    CHECK(found == 3 && alive == 0);
}

// As with stty tostop. Each rank is in a process group of its own, in the background.
TEST(ranks_write_to_a_terminal_that_stops_background_groups) {
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(grantpt(terminal) == 0 && unlockpt(terminal) == 0);
    Processes parent;
    parent.start([&] {
        setsid();
        const int screen = open(ptsname(terminal), O_RDWR);  // the session's terminal from now on
        termios settings;
        CHECK(tcgetattr(screen, &settings) == 0);
        settings.c_lflag |= TOSTOP;
        CHECK(tcsetattr(screen, TCSANOW, &settings) == 0);
        dup2(screen, STDOUT_FILENO);
        return launch_here("print");
    });
    parent.check({0});
    std::string shown(4096, '\0');
    CHECK(read(terminal, shown.data(), shown.size()) > 0 && count_of(shown, "printed") == 3);
    close(terminal);
}

// -------------------------------------------------------------------------------------------------
// Process 1 of a container

// Not even a signal's default action reaches it.
TEST(process_1_ends_by_a_signal) {
    const std::string program = std::filesystem::read_symlink("/proc/self/exe");
    const auto start = [&](Processes& job, const char* act) {
        job.start([&] {
            execlp("unshare", "unshare", "--pid", "--fork", "--kill-child", "--map-root-user",
                   program.c_str(), "--process", act, nullptr);
            return 1;
        });
    };
    const auto pid_of = [](const Processes& job) {
        job.wait_for("\n", 1);
        const int pid = std::atoi(job.text().c_str() + std::strlen("ready "));
        if (pid <= 1)
            throw Error("no process has started: " + job.text());
        return pid;
    };
    Processes allowed;
    start(allowed, "end");
    if (allowed.wait()[0] != 0)
        SKIP("unshare is not permitted here");

    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
        std::signal(signal, SIG_DFL);  // whoever started this test may ignore it
        for (const std::string act : {"prepared", "training"}) {
            Processes job;
            start(job, act.c_str());
            const int pid = pid_of(job);
            kill(pid, signal);
            if (act == "training") {
                job.wait_for("first", 1);
                sleep_for(1.2);  // until then it would be the same signal
                kill(pid, signal);
            }
            job.check({128 + signal});
        }
    }
    Processes job;
    std::signal(SIGHUP, SIG_IGN);  // as nohup does
    start(job, "prepared");
    std::signal(SIGHUP, SIG_DFL);
    const int pid = pid_of(job);
    kill(pid, SIGHUP);
    kill(pid, SIGTERM);
    job.check({128 + SIGTERM});
}

// -------------------------------------------------------------------------------------------------
// Rendezvous

TEST(ranks_connect_in_any_order) {
    CHECK(rendezvous({}, {}, kNcclId) == kNcclId);
    for (const int size : {2, 5}) {
        Processes ranks;
        const int port = free_port();
        for (int rank = size - 1; rank >= 0; rank--) {
            ranks.start([&] {
                return check_rendezvous(rank_info(rank, size, port),
                                        {{"--lr", "1"}, {"data", "x\ny"}});
            });
            if (rank == 1)
                sleep_for(0.3);
        }
        ranks.check(std::vector<int>(size));
    }
    for (const std::string address : {"localhost", "127.1.2.3", "::1"}) {
        if (address == "::1" && access("/proc/net/if_inet6", F_OK))
            continue;
        Processes ranks;
        const int port = free_port();
        for (int rank : {0, 1}) {
            ranks.start([&] {
                return check_rendezvous(
                    {.rank = rank, .size = 2, .port = port, .address = address});
            });
            if (rank == 0)
                CHECK(connect_and_say(port, "", 0.5, "127.0.0.7") == -1);  // listens nowhere else
        }
        ranks.check({0, 0});
    }
}

TEST(differences_are_named_on_every_rank) {
    const int port = free_port();
    Processes ranks;
    for (int rank : {0, 1, 2})
        ranks.start([=] {
            Fields fields = {{"--lr", rank == 2 ? "0.1" : "0.2"},
                             {"model", "d12"},
                             {"data", rank == 1 ? "a\x1b=c" : "b"}};
            return check_rendezvous(rank_info(rank, 3, port), fields);
        });
    ranks.check({1, 1, 1});
    for (const char* says : {"; --lr: rank 2 has \"0.1\", rank 0 has \"0.2\"",
                             "; data: rank 1 has \"a?=c\", rank 0 has"})
        CHECK(count_of(ranks.text(), says) == 3);
    CHECK(count_of(ranks.text(), "d12") == 0 && count_of(ranks.text(), "\n") == 3);

    // What a rank does not say differs, too.
    const int other_port = free_port();
    Processes two;
    for (const int rank : {0, 1}) {
        two.start([=] {
            Fields fields = {{"--lr", "0.1"}};
            if (rank == 0) {
                fields.push_back({"data", "b"});
            }
            return check_rendezvous(rank_info(rank, 2, other_port), fields);
        });
    }
    two.check({1, 1}, {"; data: rank 1 has \"\", rank 0 has \"b\""});
}

// All of these ranks, each (rank, size), end with an error.
TEST(missing_and_wrong_ranks_are_named) {
    const struct {
        std::vector<std::pair<int, int>> ranks;
        std::vector<std::string> says;
    } cases[] = {
        {{{0, 4}, {2, 4}},
         {"rank: of 4 ranks these did not connect to port ", " within 1 s: 1, 3; refused: none"}},
        {{{0, 2}, {2, 3}},
         {"; refused: rank 2", "rank: rank 2",
          " is one too many; start all ranks with the same number"}},
        {{{0, 2}, {1, 3}}, {"; number of ranks: rank 1 has \"3\", rank 0 has \"2\""}},
        {{{0, 3}, {1, 3}, {1, 3}}, {"; refused: rank 1 is", "is one too many", ", and each once"}},
        {{{1, 2}}, {"cannot reach rank 0 at 127.0.0.1 port ", "MASTER_PORT"}}};
    for (const auto& c : cases) {
        Processes processes;
        const int port = free_port();
        for (const auto& [rank, size] : c.ranks)
            processes.start([&, rank = rank, size = size] {
                return check_rendezvous(rank_info(rank, size, port), {}, 1);
            });
        processes.check(std::vector<int>(c.ranks.size(), 1), c.says);
    }
}

TEST(a_port_is_another_programs_at_first) {
    const std::string mail_server = "220 mail ready\r\n";
    const std::string killed_rank_0 = "gpt2 ranks: ";  // the start of an answer
    for (const std::string& reply : {mail_server, killed_rank_0}) {
        const int port = free_port();
        const int fd = listen_at("127.0.0.1", port);
        CHECK_ERROR(rendezvous(rank_info(0, 2, port), {}, ""),
                    "Address already in use; set MASTER_ADDR");
        Processes ranks;
        ranks.start([&] {
            close(fd);
            return check_rendezvous(rank_info(1, 2, port));
        });
        const int guest = accept(fd, nullptr, nullptr);
        send(guest, reply.data(), reply.size(), MSG_NOSIGNAL);
        shutdown(guest, SHUT_WR);
        close(fd);
        ranks.start([&] { return check_rendezvous(rank_info(0, 2, port)); });
        ranks.check({0, 0});
        close(guest);
    }
}

// A connection that nobody refuses and nobody accepts, as behind a firewall. Here a listener's
// queue is full.
TEST(a_silent_address_delays_no_longer_than_the_timeout) {
    const int port = free_port();
    const int listener = listen_at("127.0.0.1", port);
    CHECK(listen(listener, 0) == 0);
    std::vector<int> queue;
    const sockaddr_in a = local_address(port);
    for (int i = 0; i < 4; i++) {
        queue.push_back(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
        CHECK(connect(queue.back(), reinterpret_cast<const sockaddr*>(&a), sizeof a) == -1);
        CHECK(errno == EINPROGRESS);
    }
    Processes ranks;
    ranks.start([&] { return check_rendezvous(rank_info(1, 2, port), {}, 1); });
    ranks.check({1}, {"cannot reach rank 0 at 127.0.0.1 port "});

    // Rank 0 comes there when the first try is over.
    queue.push_back(listener);
    ranks.start([&] {
        for (int fd : queue)
            close(fd);
        return check_rendezvous(rank_info(1, 2, port));
    });
    sleep_for(3);
    for (int fd : queue)
        close(fd);
    ranks.start([&] { return check_rendezvous(rank_info(0, 2, port)); });
    ranks.check({0, 0});
}

// Strangers stay or go while rank 0 waits. They are silent, say a part of a hello, or anything.
// None gets an answer.
TEST(strangers_at_the_port) {
    const int port = free_port();
    Processes ranks;
    Processes flood;
    ranks.start([&] { return check_rendezvous(rank_info(0, 2, port, "secret")); });
    const std::string wrong("Secret\0001\0002\000rank\000here\0", 21);
    std::vector<std::string> say = {"", "GET / HTTP/1.1\r\n\r\n", std::string(1000, '\0')};
    for (size_t n = 0; n <= wrong.size(); n++)
        say.push_back(wrong.substr(0, n));
    std::vector<int> stay;
    for (int i = 0; i < 300; i++) {
        const std::string& text = say[i % say.size()];
        close(connect_and_say(port, text));
        stay.push_back(connect_and_say(port, text));
        stay.push_back(connect_and_say(port, text));
        shutdown(stay.back(), SHUT_WR);  // so that it has said all
    }
    char answer;
    CHECK(recv(stay[0], &answer, 1, 0) <= 0);  // the oldest had to go
    flood.start([&] {
        const int fd = connect_and_say(port, "");
        const std::string much(100 << 20, 'x');
        return send(fd, much.data(), much.size(), MSG_NOSIGNAL) ==
               ssize_t(much.size());  // taken without end
    });
    flood.check({0});
    CHECK_ERROR(rendezvous(rank_info(1, 2, port, "guess"), {}, "", 0.3),
                "is not rank 0 of this job");
    for (int rank : {-1, 2})
        CHECK_ERROR(rendezvous(rank_info(rank, 2, port, "secret"), {}, ""), "is one too many");
    ranks.start([&] { return rendezvous(rank_info(1, 2, port, "secret"), {}, "") != kNcclId; });
    ranks.check({0, 0});
    for (int fd : stay) {
        CHECK(recv(fd, &answer, 1, MSG_DONTWAIT) <= 0);
        close(fd);
    }
    CHECK(connect_and_say(port, "", 0.1) == -1);  // nobody listens
}

// What a rank says on its way tells how far it came.
TEST(the_watchdog_ends_what_hangs_and_nothing_else) {
    const auto check = [](int code, const std::string& says, auto body) {
        Processes rank;
        rank.start([&] {
            Watchdog dog([] { return std::string("rank 3 at step 12"); });
            body(dog);
            return 0;
        });
        rank.check({code}, {});
        CHECK(rank.text() == says);
    };
    const auto say = [](const char* what) {
        std::puts(what);
        std::fflush(stdout);
    };
    check(0, "", [](Watchdog& dog) {
        bool lives = true;
        dog.set_timeout(60);
        dog.set_error_source([&] { return std::string(lives ? "" : "asked too late"); });
        sleep_for(0.3);
        dog.set_error_source(nullptr);
        lives = false;
        sleep_for(0.3);
    });
    // The time in which it was allowed to stand still does not count later.
    check(0, "stood still\nworks\n", [&](Watchdog& dog) {
        dog.set_timeout(0);
        sleep_for(3);
        say("stood still");
        dog.set_timeout(2);
        sleep_for(1);
        say("works");
    });
    // It works for longer than it may hang, is allowed to stand still, and hangs.
    const std::string hangs =
        "worked\nstood still\ntrain_gpt2cu: rank 3 at step 12: no progress for 2 s; the job ends\n";
    check(1, hangs, [&](Watchdog& dog) {
        dog.set_timeout(2);
        for (int i = 0; i < 40; i++, sleep_for(0.1))
            note_progress();
        say("worked");
        dog.set_timeout(0);
        sleep_for(3);
        say("stood still");
        dog.set_timeout(2);
        sleep_for(60);
        say("hung to the end");
    });
    check(1, "train_gpt2cu: rank 3 at step 12: NCCL is gone; the job ends\n", [&](Watchdog& dog) {
        dog.set_error_source([] { return std::string(); });
        sleep_for(0.3);
        dog.set_error_source([] { return std::string("NCCL is gone"); });
        sleep_for(60);
        say("went on");
    });
}

TEST(a_rank_without_a_thread_to_spare_has_no_watchdog) {
    Processes rank;
    rank.start([&] {
        no_threads = true;
        Watchdog dog([] { return std::string("rank 3 at step 12"); });
        dog.set_timeout(0.1);
        dog.set_error_source([] { return std::string(); });
        sleep_for(0.5);
        return 7;
    });
    rank.check({7}, {"rank 3 at step 12: no thread for the watchdog"});
    CHECK(count_of(rank.text(), "\n") == 1);
}

int main(int argc, char** argv) {
    if (argc == 3 && std::string(argv[1]) == "--child")
        return run_program("child", [&] { return child(argv[2]); });
    if (argc == 3 && std::string(argv[1]) == "--process")
        return process(argv[2]);
    return test::main(argc, argv);
}
