// Tests how ranks start, find each other and end, without a model. Launchers set their variables,
// --gpus starts processes, ranks are missing or wrong in every way, strangers come to the port, and
// the watchdog ends what hangs.
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
#include <utility>

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
    const double deadline = now() + timeout;
    while (now() <= deadline) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, reinterpret_cast<const sockaddr*>(&a), sizeof a) == 0) {
            send(fd, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
            return fd;
        }
        close(fd);
        sleep_for(0.01);
    }
    return -1;
}

const std::string kNcclId("\0an id\n\0with\0\0zeros\0", 20);

// Takes part in a rendezvous as this rank and checks that it gets the id of rank 0.
int check_rendezvous(const RankInfo& self, const Fields& fields = {}, double timeout = 20) {
    CHECK(rendezvous(self, fields, self.rank == 0 ? kNcclId : "", timeout) == kNcclId);
    return 0;
}

// What rank_from_environment() says with these variables alone, whatever has started this test.
std::string launched_with(const std::string& environment) {
    std::istringstream words(environment);
    std::vector<std::string> variables(std::istream_iterator<std::string>(words), {});
    std::vector<char*> alone;
    for (std::string& v : variables)
        alone.push_back(v.data());
    alone.push_back(nullptr);

    char** const inherited = std::exchange(environ, alone.data());
    std::string got;
    try {
        const RankInfo self = rank_from_environment();
        got = format("rank %d of %d, %d of %d here, at %s %d, job %s;", self.rank, self.size,
                     self.local_rank, self.local_size, self.address.c_str(), self.port,
                     self.job.c_str());
    } catch (const UsageError& e) {
        got = e.what();
    }
    environ = inherited;
    return got;
}

volatile std::sig_atomic_t interrupts = 0;  // how many SIGINT have come

// Prints its number and waits for SIGINT, or half a minute. Returns 0 if it came exactly once.
int wait_for_interrupt() {
    std::printf("ready %d\n", static_cast<int>(getpid()));
    std::fflush(stdout);
    for (int i = 0; i < 300 && interrupts == 0; i++)
        sleep_for(0.1);
    sleep_for(0.5);  // in which another may come
    if (interrupts == 0)
        std::puts("not ended");
    return interrupts == 1 ? 0 : 4;
}

// A rank of --gpus, which is this program with other arguments. What it does:
//   "rendezvous": gets the id of rank 0
//   "exit":       rank 1 ends with code 3, and the others wait for a signal
//   "die":        rank 0 ends with code 4, a second later rank 1 is killed, and a second after that
//                 rank 2 ends with code 6
//   "print":      prints a line
//   "count":      waits for SIGINT, which must come once
//   "sleep":      waits for a signal
int child(const std::string& act) {
    const RankInfo self = rank_from_environment();
    if (act == "rendezvous") {
        check_rendezvous(self);
        CHECK(self.local_rank == self.rank);
        return test::failed_checks();
    }
    if (act == "exit" && self.rank == 1)
        return 3;
    if (act == "die") {
        sleep_for(self.rank);
        if (self.rank == 1)
            raise(SIGKILL);
        return 4 + self.rank;
    }
    if (act == "print")
        return std::puts("printed") < 0 ? 1 : 0;
    if (act == "count")
        std::signal(SIGINT, [](int) { interrupts = interrupts + 1; });
    return wait_for_interrupt();
}

// Starts three ranks as --gpus 3 does.
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

namespace {

// What a rank knows from the variables that a launcher sets, or a part of the error.
struct Launched {
    std::string environment;
    std::string says;
};
void check_launched(const std::vector<Launched>& cases) {
    for (const auto& [environment, says] : cases) {
        const std::string got = launched_with(environment);
        if (!contains(got, says))
            test::report(__FILE__, __LINE__, environment + ": " + got + ", expected " + says);
    }
}

const std::string kMpirun =
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 ";

}  // namespace

TEST(variables_by_hand) {
    check_launched({
        {"MASTER_PORT=29500", "rank 0 of 1, 0 of 1 here"},
        {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=1 GPT2_JOB=g",
         "rank 0 of 2, 0 of 1 here, at n1 1, job g;"},
    });
}

// torchrun itself listens on 29500.
TEST(variables_of_torchrun) {
    const std::string torchrun =
        "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=29500 "
        "TORCHELASTIC_RUN_ID=x TORCHELASTIC_RESTART_COUNT=2 ";
    check_launched({
        {torchrun, "rank 3 of 8, 1 of 4 here, at n1 29501, job x.2;"},
        {torchrun + "GPT2_JOB=secret SLURM_JOB_ID=5", "at n1 29501, job secret.x.2;"},
    });
}

// Where not all ranks are known to be on this machine, the address and the port of rank 0 must be
// given. Where all are, both may be left out, but not only one of them. If both are, the port
// depends on the job's name and always starts with 2.
TEST(variables_of_mpirun) {
    check_launched({
        {kMpirun + "PMIX_NAMESPACE=p7 MASTER_ADDR=n2 MASTER_PORT=5000",
         "rank 1 of 2, 0 of 1 here, at n2 5000, job p7;"},
        {kMpirun + "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=p7",
         "rank 1 of 2, 0 of 2 here, at 127.0.0.1 2"},
        {kMpirun + "OMPI_COMM_WORLD_LOCAL_SIZE=1", "set MASTER_ADDR"},
        {kMpirun, "set MASTER_ADDR"},
        {kMpirun + "OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_PORT=1", "set MASTER_ADDR"},
        {kMpirun + "OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=n1", "MASTER_PORT is \"\""},
    });
}

TEST(jobs_of_mpirun_on_one_machine_have_different_ports) {
    const auto address = [](const char* job) {
        const std::string got =
            launched_with(kMpirun + "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_MCA_ess_base_jobid=" + job);
        return got.substr(0, got.find(", job"));
    };
    CHECK(address("7") != address("8"));
}

TEST(variables_of_intel_mpi) {
    const std::string intel = "PMI_RANK=1 PMI_SIZE=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=";
    check_launched({
        {intel + "2 MASTER_ADDR=n4 MASTER_PORT=5002 RANK= WORLD_SIZE=",
         "rank 1 of 6, 1 of 2 here, at n4 5002, job ;"},
        {intel + "6 PMI_JOBID=33", "job 33;"},
        {intel + "6", format("job %d;", getppid())},
    });
}

TEST(variables_of_slurm) {
    const std::string rank = "SLURM_PROCID=2 SLURM_LOCALID=2 ";
    const std::string slurm =
        rank + "SLURM_STEP_TASKS_PER_NODE=3(x2) SLURM_JOB_ID=77 SLURM_STEP_ID=1 ";
    check_launched({
        {slurm + "SLURM_STEP_NUM_TASKS=6 MASTER_ADDR=n3 MASTER_PORT=5001",
         "rank 2 of 6, 2 of 3 here, at n3 5001, job 77.1;"},
        {slurm + "MASTER_ADDR=n3", "rank 0 of 1,"},  // no size, as in a batch script
        {slurm + "SLURM_STEP_NUM_TASKS=3", "rank 2 of 3, 2 of 3 here, at 127.0.0.1 2"},
        // PMI's variables outrank Slurm's: there are 4 ranks, although the step has 1 task. Where
        // PMI does not say which local rank this is, Slurm does. But if PMI does not say how many
        // ranks are here, 1 is the default, and Slurm's 3 tasks per node do not count.
        {slurm + "SLURM_STEP_NUM_TASKS=1 PMI_RANK=2 PMI_SIZE=4 MASTER_ADDR=n3 MASTER_PORT=1",
         "rank 2 of 4, 2 of 1 here"},
        {rank + "SLURM_STEP_TASKS_PER_NODE=3,2 SLURM_STEP_NUM_TASKS=5 MASTER_ADDR=n3 "
                "MASTER_PORT=5001",
         "rank 2 of 5, 2 of 3 here"},
    });
}

TEST(wrong_variables_are_named) {
    check_launched({
        {"RANK=4 WORLD_SIZE=4", " RANK is \"4\""},
        {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=2", " LOCAL_RANK is \"2\""},
        {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=n MASTER_PORT=65536", "MASTER_PORT is \"65536\""},
        // torchrun's next port
        {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=n MASTER_PORT=65535 TORCHELASTIC_RUN_ID=x",
         "MASTER_PORT is \"65535\""},
        {"WORLD_SIZE=2", " RANK is \"\""},  // which is missing
        {"RANK=0", " WORLD_SIZE is \"\""},
        {"RANK=0 WORLD_SIZE=0", "WORLD_SIZE is \"0\""},
        {"RANK=1x WORLD_SIZE=2", " RANK is \"1x\""},
        {"RANK=-1 WORLD_SIZE=2", " RANK is \"-1\""},
    });
}

// -------------------------------------------------------------------------------------------------
// --gpus

TEST(gpus_starts_and_ends_ranks) {
    const struct {
        std::string act;
        int signal;  // is sent to the parent, which passes on all but SIGALRM, or 0
        int code;
        std::vector<std::string> says;
        int lines;  // that the parent prints
    } cases[] = {
        {"rendezvous", 0, 0, {}, 0},
        {"exit", 0, 3, {"rank 1 (pid ", ") exited with code 3\n"}, 1},
        // a kill outranks the code of rank 0, and then that of rank 2 is not even printed
        {"die", 0, 128 + SIGKILL, {") exited with code 4\n", "rank 1 (pid ", "by signal 9 ("}, 2},
        {"count", SIGINT, 0, {}, 0},
        {"sleep", SIGALRM, 128 + SIGALRM, {}, 0},  // as with any process
        {"sleep", SIGTERM, 128 + SIGTERM, {"by signal 15 ("}, 1}};
    constexpr size_t n = std::size(cases);
    std::vector<Processes> parents(n);
    for (size_t i = 0; i < n; i++)
        launch(parents[i], cases[i].act);
    for (size_t i = 0; i < n; i++)
        if (cases[i].signal != 0) {
            parents[i].wait_for("ready", 3);
            // to its group, as a terminal does; each rank has a group of its own
            kill(-parents[i].pids[0], cases[i].signal);
        }
    for (size_t i = 0; i < n; i++) {
        parents[i].check({cases[i].code}, cases[i].says);
        CHECK(!contains(parents[i].text(), "not ended"));
        CHECK(count_of(parents[i].text(), "train_gpt2cu: ") == cases[i].lines);
    }
}

TEST(ranks_die_with_their_parent) {
    Processes parent;
    launch(parent, "sleep");
    parent.wait_for("ready", 3);
    kill(parent.pids[0], SIGKILL);
    parent.check({128 + SIGKILL});

    std::vector<int> ranks;
    std::istringstream words(parent.text());
    std::string ready;
    int pid = 0;
    while (words >> ready >> pid)
        ranks.push_back(pid);
    CHECK(ranks.size() == 3);

    const auto lives = [](int pid) { return kill(pid, 0) == 0; };
    const double deadline = now() + 5;
    while (std::any_of(ranks.begin(), ranks.end(), lives) && now() < deadline)
        sleep_for(0.01);
    CHECK(std::none_of(ranks.begin(), ranks.end(), lives));
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
    CHECK(read(terminal, shown.data(), shown.size()) > 0);
    CHECK(count_of(shown, "printed") == 3);
    close(terminal);
}

// -------------------------------------------------------------------------------------------------
// Process 1 of a container

// The kernel drops every signal for which process 1 has no handler, whatever the default action is.
namespace {

// What process 1 does: it ends at once ("end"), or waits for signals as the program does before
// ("prepared") or during training ("training"), and then only a signal ends it.
int process_1(const std::string& act) {
    if (act == "end")
        return 0;
    prepare_process();
    if (act == "training")
        catch_signals();

    // Its number outside of its container, because /proc was mounted out there.
    std::printf("ready %s\n", std::filesystem::read_symlink("/proc/self").c_str());
    std::fflush(stdout);
    while (!g_signal)
        sleep_for(0.01);
    std::puts("first");
    std::fflush(stdout);
    for (;;)
        pause();
}

// Starts this program as process 1, with other arguments.
void start_as_process_1(Processes& job, const char* act) {
    job.start([&] {
        const std::string program = std::filesystem::read_symlink("/proc/self/exe");
        execlp("unshare", "unshare", "--pid", "--fork", "--kill-child", "--map-root-user",
               program.c_str(), "--process", act, nullptr);
        return 1;
    });
}

int pid_of_process_1(const Processes& job) {
    job.wait_for("\n", 1);
    const int pid = std::atoi(job.text().c_str() + std::strlen("ready "));
    if (pid <= 1)
        throw Error("no process has started: " + job.text());
    return pid;
}

void need_unshare() {
    Processes job;
    start_as_process_1(job, "end");
    if (job.wait()[0] != 0)
        SKIP("unshare is not permitted here");
}

}  // namespace

// Before training the first signal ends it. A training run saves after the first one, and a second
// one that comes a second later ends it.
TEST(process_1_ends_by_a_signal) {
    need_unshare();
    const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    std::vector<Processes> prepared(3);
    std::vector<Processes> training(3);
    for (size_t i = 0; i < 3; i++) {
        std::signal(signals[i], SIG_DFL);  // whoever started this test may ignore it
        start_as_process_1(prepared[i], "prepared");
        start_as_process_1(training[i], "training");
    }
    for (size_t i = 0; i < 3; i++) {
        kill(pid_of_process_1(prepared[i]), signals[i]);
        kill(pid_of_process_1(training[i]), signals[i]);
    }
    for (size_t i = 0; i < 3; i++)
        training[i].wait_for("first", 1);
    sleep_for(1.2);  // until then it would be the same signal
    for (size_t i = 0; i < 3; i++) {
        kill(pid_of_process_1(training[i]), signals[i]);
        prepared[i].check({128 + signals[i]});
        training[i].check({128 + signals[i]});
    }
}

TEST(process_1_under_nohup_ignores_hangups) {
    need_unshare();
    Processes job;
    std::signal(SIGHUP, SIG_IGN);
    start_as_process_1(job, "prepared");
    std::signal(SIGHUP, SIG_DFL);
    const int pid = pid_of_process_1(job);
    kill(pid, SIGHUP);
    kill(pid, SIGTERM);
    job.check({128 + SIGTERM});
}

// -------------------------------------------------------------------------------------------------
// Rendezvous

TEST(ranks_connect_in_any_order) {
    CHECK(rendezvous({}, {}, kNcclId) == kNcclId);
    const Fields fields = {{"--lr", "1"}, {"data", "x\ny"}};
    for (const int size : {2, 5}) {
        Processes ranks;
        const int port = free_port();
        for (int rank = size - 1; rank > 0; rank--)
            ranks.start([&] { return check_rendezvous(rank_info(rank, size, port), fields); });
        sleep_for(0.3);
        ranks.start([&] { return check_rendezvous(rank_info(0, size, port), fields); });
        ranks.check(std::vector<int>(size));
    }
}

TEST(rank_0_listens_at_its_address_alone) {
    for (const std::string address : {"localhost", "127.1.2.3", "::1"}) {
        const bool has_ipv6 = access("/proc/net/if_inet6", F_OK) == 0;
        if (address == "::1" && !has_ipv6)
            continue;
        const int port = free_port();
        const auto check = [&](int rank) {
            return check_rendezvous({.rank = rank, .size = 2, .port = port, .address = address});
        };
        Processes ranks;
        ranks.start([&] { return check(0); });
        CHECK(connect_and_say(port, "", 0.5, "127.0.0.7") == -1);
        ranks.start([&] { return check(1); });
        ranks.check({0, 0});
    }
}

TEST(differences_are_named_on_every_rank) {
    const int port = free_port();
    Processes ranks;
    for (int rank : {0, 1, 2})
        ranks.start([=] {
            const Fields fields = {{"--lr", rank == 2 ? "0.1" : "0.2"},
                                   {"model", "d12"},
                                   {"data", rank == 1 ? "a\x1b=c" : "b"}};
            return check_rendezvous(rank_info(rank, 3, port), fields);
        });
    ranks.check({1, 1, 1});
    for (const char* says : {"; --lr: rank 2 has \"0.1\", rank 0 has \"0.2\"",
                             "; data: rank 1 has \"a?=c\", rank 0 has"})
        CHECK(count_of(ranks.text(), says) == 3);
    CHECK(!contains(ranks.text(), "d12"));
    CHECK(count_of(ranks.text(), "\n") == 3);
}

TEST(a_field_that_one_rank_lacks_differs) {
    const int port = free_port();
    Processes ranks;
    ranks.start(
        [=] { return check_rendezvous(rank_info(0, 2, port), {{"--lr", "0.1"}, {"data", "b"}}); });
    ranks.start([=] { return check_rendezvous(rank_info(1, 2, port), {{"--lr", "0.1"}}); });
    ranks.check({1, 1}, {"; data: rank 1 has \"\", rank 0 has \"b\""});
}

TEST(missing_and_wrong_ranks_are_named) {
    struct Rank {
        int rank;
        int size;
    };
    const struct {
        std::vector<Rank> ranks;  // all of which end with an error
        std::vector<std::string> says;
    } cases[] = {
        {{{0, 4}, {2, 4}}, {"of the 4 ranks", " 1 s: 1, 3;", "refused: none"}},
        {{{0, 2}, {2, 3}}, {"refused: rank 2", "rank: rank 2", "is not below", "same number"}},
        {{{0, 2}, {1, 3}}, {"number of ranks: rank 1 has \"3\", rank 0 has \"2\""}},
        {{{0, 3}, {1, 3}, {1, 3}},
         {"refused: rank 1 has connected already", "start each rank once"}},
        {{{1, 2}}, {"cannot reach rank 0 at 127.0.0.1 port ", "MASTER_PORT"}}};
    constexpr size_t n = std::size(cases);
    std::vector<Processes> jobs(n);
    for (size_t i = 0; i < n; i++) {
        const int port = free_port();
        for (const Rank& r : cases[i].ranks)
            jobs[i].start([&] { return check_rendezvous(rank_info(r.rank, r.size, port), {}, 1); });
    }
    for (size_t i = 0; i < n; i++)
        jobs[i].check(std::vector<int>(cases[i].ranks.size(), 1), cases[i].says);
}

TEST(another_program_has_the_port_at_first) {
    const std::string mail_server = "220 mail ready\r\n";
    const std::string killed_rank_0 = "gpt2 ranks: ";  // the start of an answer
    for (const std::string& reply : {mail_server, killed_rank_0}) {
        const int port = free_port();
        const int fd = listen_at("127.0.0.1", port);
        CHECK_ERROR(rendezvous(rank_info(0, 2, port), {}, ""), "Address already in use");

        Processes ranks;
        ranks.start([&] {
            close(fd);  // or else this process keeps the port
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

namespace {

// A listener whose queue is full: nobody refuses a connection, and nobody accepts it, as behind a
// firewall.
struct SilentAddress {
    int port = free_port();
    std::vector<int> sockets = {listen_at("127.0.0.1", port)};

    SilentAddress() {
        CHECK(listen(sockets[0], 0) == 0);
        const sockaddr_in a = local_address(port);
        for (int i = 0; i < 4; i++) {
            const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
            CHECK(connect(fd, reinterpret_cast<const sockaddr*>(&a), sizeof a) == -1);
            CHECK(errno == EINPROGRESS);
            sockets.push_back(fd);
        }
    }

    void close_all() const {
        for (int fd : sockets)
            close(fd);
    }
};

}  // namespace

TEST(a_silent_address_delays_no_longer_than_the_timeout) {
    const SilentAddress silent;
    Processes ranks;
    ranks.start([&] { return check_rendezvous(rank_info(1, 2, silent.port), {}, 1); });
    ranks.check({1}, {format("127.0.0.1 port %d", silent.port)});
    silent.close_all();
}

TEST(rank_0_comes_to_a_silent_address_later) {
    const SilentAddress silent;
    Processes ranks;
    ranks.start([&] {
        silent.close_all();  // or else this process keeps the queue
        return check_rendezvous(rank_info(1, 2, silent.port));
    });
    sleep_for(3);  // when its first try is over
    silent.close_all();
    ranks.start([&] { return check_rendezvous(rank_info(0, 2, silent.port)); });
    ranks.check({0, 0});
}

// Strangers stay or close their connections while rank 0 waits. They are silent, send a part of a
// hello, or anything else. None gets an answer, and none delays rank 1.
TEST(strangers_at_the_port) {
    const int port = free_port();
    Processes ranks;
    ranks.start([&] { return check_rendezvous(rank_info(0, 2, port, "secret")); });

    // another job's hello, whose strings each end with a zero byte
    std::string wrong;
    for (const std::string part : {"Secret", "1", "2", "rank", "here"})
        wrong += part + '\0';
    std::vector<std::string> messages = {"", "GET / HTTP/1.1\r\n\r\n", std::string(1000, '\0')};
    for (size_t n = 0; n <= wrong.size(); n++)
        messages.push_back(wrong.substr(0, n));
    std::vector<int> stay;
    for (int i = 0; i < 300; i++) {
        const std::string& message = messages[i % messages.size()];
        close(connect_and_say(port, message));
        stay.push_back(connect_and_say(port, message));
        stay.push_back(connect_and_say(port, message));
        shutdown(stay.back(), SHUT_WR);  // says that nothing follows
    }
    char answer;
    CHECK(recv(stay[0], &answer, 1, 0) <= 0);  // the oldest is dropped

    Processes flood;
    flood.start([&] {
        const int fd = connect_and_say(port, "");
        const std::string much(100 << 20, 'x');
        const ssize_t sent = send(fd, much.data(), much.size(), MSG_NOSIGNAL);
        return sent == ssize_t(much.size()) ? 1 : 0;  // it must not be read without end
    });
    flood.check({0});

    CHECK_ERROR(rendezvous(rank_info(1, 2, port, "guess"), {}, "", 0.3),
                "another program answered");
    for (int rank : {-1, 2})
        CHECK_ERROR(rendezvous(rank_info(rank, 2, port, "secret"), {}, ""), "start each rank once");
    ranks.start([&] {
        const std::string id = rendezvous(rank_info(1, 2, port, "secret"), {}, "");
        return id == kNcclId ? 0 : 1;
    });
    ranks.check({0, 0});

    for (int fd : stay) {
        CHECK(recv(fd, &answer, 1, MSG_DONTWAIT) <= 0);
        close(fd);
    }
    CHECK(connect_and_say(port, "", 0.1) == -1);  // nobody listens any more
}

// -------------------------------------------------------------------------------------------------
// The watchdog

namespace {

// What a rank prints tells how far it came.
void say(const char* what) {
    std::puts(what);
    std::fflush(stdout);
}

// The function must not be called any more once it is taken back.
void takes_its_error_source_back(Watchdog& dog) {
    bool lives = true;
    dog.set_timeout(60);
    dog.set_error_source([&] { return std::string(lives ? "" : "asked too late"); });
    sleep_for(0.3);
    dog.set_error_source(nullptr);
    lives = false;
    sleep_for(0.3);
}

// The time without a timeout does not count later.
void pauses(Watchdog& dog) {
    dog.set_timeout(0);
    sleep_for(3);
    say("paused");
    dog.set_timeout(2);
    sleep_for(1);
    say("works");
}

// Works for longer than its timeout, pauses, and hangs.
void hangs(Watchdog& dog) {
    dog.set_timeout(2);
    for (int i = 0; i < 40; i++) {
        note_progress();
        sleep_for(0.1);
    }
    say("worked");
    dog.set_timeout(0);
    sleep_for(3);
    say("paused");
    dog.set_timeout(2);
    sleep_for(60);
    say("hung to the end");
}

void has_an_error(Watchdog& dog) {
    dog.set_error_source([] { return std::string(); });
    sleep_for(0.3);
    dog.set_error_source([] { return std::string("NCCL is gone"); });
    sleep_for(60);
    say("continued");
}

}  // namespace

TEST(the_watchdog_ends_what_hangs_and_nothing_else) {
    const std::string dies = "train_gpt2cu: rank 3 at step 12: ";
    const struct {
        void (*body)(Watchdog&);
        int code;
        std::string says;
    } cases[] = {{takes_its_error_source_back, 0, ""},
                 {pauses, 0, "paused\nworks\n"},
                 {hangs, 1, "worked\npaused\n" + dies + "no progress for 2 s"},
                 {has_an_error, 1, dies + "NCCL is gone"}};
    constexpr size_t n = std::size(cases);
    std::vector<Processes> ranks(n);
    for (size_t i = 0; i < n; i++)
        ranks[i].start([&] {
            Watchdog dog([] { return std::string("rank 3 at step 12"); });
            cases[i].body(dog);
            return 0;
        });
    for (size_t i = 0; i < n; i++) {
        ranks[i].check({cases[i].code});
        const std::string& says = cases[i].says;
        const std::string text = ranks[i].text();
        CHECK(text.compare(0, says.size(), says) == 0);
        CHECK(count_of(text, "\n") == count_of(says, "\n") + (cases[i].code == 0 ? 0 : 1));
    }
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
    rank.check({7}, {"rank 3 at step 12: "});
    CHECK(count_of(rank.text(), "\n") == 1);
}

int main(int argc, char** argv) {
    if (argc == 3 && std::string(argv[1]) == "--child")
        return run_program("child", [&] { return child(argv[2]); });
    if (argc == 3 && std::string(argv[1]) == "--process")
        return process_1(argv[2]);
    return test::main(argc, argv);
}
