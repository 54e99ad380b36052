// The test harness: TEST(name) { CHECK(...); } defines a test, and TEST_MAIN a main that runs them.
//
// A program's argument selects the tests whose names contain it. The program prints a line for each
// failed check and each test, and ends with "N passed, N failed, N skipped". The exit code is 1 if
// anything failed or no test has such a name.
//
// A test that takes longer than its limit is reported as failed and ends the program.
// TEST_LIMIT(seconds) in the program sets the limit, and TEST_PATIENCE=3 in the environment makes
// it three times as long. (run_tests.sh has a variable TEST_LIMIT, the limit of a whole program.)
#pragma once
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "common/error.h"

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

namespace test {

struct Case {
    std::string name;
    std::function<void()> run;
};

// Thrown by a test that cannot run here.
struct Skip {
    std::string why;
};

inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

struct Register {
    Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

// -------------------------------------------------------------------------------------------------
// Checks

// How many checks of the running test have failed.
inline int& failed_checks() {
    static int n = 0;
    return n;
}

// Reports a failed check: at a line of a file, or at an element of a tensor or the like. Only the
// first 20 of a test are printed.
inline void report(const char* place, int number, const std::string& what) {
    if (++failed_checks() <= 20)
        std::printf("  %s:%d: %s\n", place, number, what.c_str());
}

// Runs `code` and returns the message of the Error that it throws, "" if it throws none.
template <class F>
std::string error_of(F code) {
    try {
        code();
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

inline void check_near(const char* file, int line, const char* got_text, double got,
                       const char* want_text, double want, double tol) {
    if (!(std::fabs(got - want) <= tol))
        report(file, line,
               format("%s = %.9g, expected %s = %.9g within %.3g", got_text, got, want_text, want,
                      tol));
}

inline void check_error(const char* file, int line, const std::string& error,
                        const std::string& part) {
    const bool is_one_line = !contains(error, "\n");
    if (error.empty() || !contains(error, part) || !is_one_line)
        report(file, line, "expected an error with \"" + part + "\", got \"" + error + "\"");
}

// -------------------------------------------------------------------------------------------------
// The time limit

inline double limit_s = 300;    // of a test
inline std::string last_words;  // what the program prints if the running test exceeds its limit

// A signal handler, because a test may hang in a call that nothing else can end.
inline void out_of_time(int) {
    if (write(STDOUT_FILENO, last_words.data(), last_words.size()) < 0)
        _exit(2);
    // Kills what the test started, too, if this program leads its process group. In run_tests.sh
    // timeout leads the group, and run_tests.sh kills it.
    if (getpgrp() == getpid())
        kill(0, SIGKILL);
    _exit(1);
}

// 0 stops the timer.
inline void set_timer(double seconds) {
    itimerval timer = {};
    timer.it_value.tv_sec = static_cast<time_t>(seconds);
    timer.it_value.tv_usec = static_cast<suseconds_t>(std::fmod(seconds, 1) * 1e6);
    setitimer(ITIMER_REAL, &timer, nullptr);
}

// -------------------------------------------------------------------------------------------------
// Running the tests

struct Counts {
    int passed = 0;
    int failed = 0;
    int skipped = 0;

    std::string text() const {
        return format("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    }
};

// Returns why the test was skipped, or "".
inline std::string run(const Case& c) {
    failed_checks() = 0;
    try {
        c.run();
    } catch (const Skip& skip) {
        return skip.why;
    } catch (const std::exception& e) {
        report(c.name.c_str(), 0, format("threw: %s", e.what()));
    }
    return "";
}

inline void run_and_count(const Case& c, double limit, Counts& counts) {
    Counts if_it_hangs = counts;
    if_it_hangs.failed++;
    last_words = format("FAIL %s: did not end within %g s; the tests after it did not run\n",
                        c.name.c_str(), limit) +
                 if_it_hangs.text();

    const double start = now();
    set_timer(limit);
    const std::string skip = run(c);
    set_timer(0);

    const char* verdict = "ok  ";
    if (failed_checks()) {
        verdict = "FAIL";
        counts.failed++;
    } else if (!skip.empty()) {
        verdict = "skip";
        counts.skipped++;
    } else {
        counts.passed++;
    }
    std::printf("%s %s (%.1f s)%s%s\n", verdict, c.name.c_str(), now() - start,
                skip.empty() ? "" : ": ", skip.c_str());
    std::fflush(stdout);
}

inline int main(int argc, char** argv) {
    const std::string part = argc > 1 ? argv[1] : "";
    const char* patience = std::getenv("TEST_PATIENCE");
    const double limit = limit_s * (patience ? std::atof(patience) : 1);

    // so that the output of a test that hangs is not lost
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    signal(SIGALRM, out_of_time);

    Counts counts;
    for (const Case& c : cases())
        if (contains(c.name, part))
            run_and_count(c, limit, counts);

    if (counts.passed + counts.failed + counts.skipped == 0) {
        std::printf("FAIL no test has \"%s\" in its name\n", part.c_str());
        counts.failed = 1;
    }
    std::fputs(counts.text().c_str(), stdout);
    return counts.failed ? 1 : 0;
}

}  // namespace test

#define TEST(name)                                             \
    static void test_##name();                                 \
    static test::Register register_##name(#name, test_##name); \
    static void test_##name()

// Sets the limit of each test of the program, before main() begins.
#define TEST_LIMIT(seconds) static const double test_limit_s = test::limit_s = seconds

#define SKIP(...)           \
    throw test::Skip {      \
        format(__VA_ARGS__) \
    }

#define CHECK(ok)                                               \
    do {                                                        \
        if (!(ok))                                              \
            test::report(__FILE__, __LINE__, "not true: " #ok); \
    } while (0)

// |got − want| ≤ tol. NaN fails.
#define CHECK_NEAR(got, want, tol) \
    test::check_near(__FILE__, __LINE__, #got, (got), #want, (want), (tol))

// The code throws an Error whose message is one line and contains `part`.
#define CHECK_ERROR(code, part) \
    test::check_error(__FILE__, __LINE__, test::error_of([&] { code; }), part)

#define TEST_MAIN                      \
    int main(int argc, char** argv) {  \
        return test::main(argc, argv); \
    }
