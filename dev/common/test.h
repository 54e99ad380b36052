// The test harness: TEST(name) { CHECK(...); } and a main that runs them.
//
// A program takes an optional substring to select tests. It prints a line per failed check and a
// line per test, and ends with "N passed, N failed, N skipped". The exit code is 1 if anything
// failed or no test has such a name. A test that takes longer than its limit is named, fails, and
// ends the program. TEST_LIMIT sets the limit, and TEST_PATIENCE=3 in the environment makes it
// three times as long.
#pragma once
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/error.h"

namespace test {

struct Case {
    const char* name;
    void (*run)();
};
struct Skip {
    std::string why;
};
inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}
inline int& failed_checks() {
    static int n = 0;
    return n;
}
struct Register {
    Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};
inline void report(const char* file, int line, const std::string& what) {
    if (++failed_checks() <= 20)
        std::printf("  %s:%d: %s\n", file, line, what.c_str());
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

// What CHECK_NEAR and CHECK_ERROR do.
inline void check_near(const char* file, int line, const char* got_text, double got,
                       const char* want_text, double want, double tol) {
    if (!(std::fabs(got - want) <= tol))
        report(file, line,
               format("%s = %.9g, expected %s = %.9g within %.3g", got_text, got, want_text, want,
                      tol));
}
inline void check_error(const char* file, int line, const std::string& error,
                        const std::string& part) {
    const bool is_one_line = error.find('\n') == std::string::npos;
    if (error.empty() || error.find(part) == std::string::npos || !is_one_line)
        report(file, line, "expected an error with \"" + part + "\", got \"" + error + "\"");
}

inline double limit_s = 300;  // of a test
inline std::string last_words;
// A signal handler, because a test may hang in a call that nothing else can end.
inline void out_of_time(int) {
    if (write(STDOUT_FILENO, last_words.data(), last_words.size()) < 0)
        _exit(2);
    // kills what it started too, or else the runner of the tests does
    if (getpgrp() == getpid())
        kill(0, SIGKILL);
    _exit(1);
}
inline void set_timer(double seconds) {
    const itimerval timer = {
        {}, {static_cast<time_t>(seconds), static_cast<suseconds_t>(std::fmod(seconds, 1) * 1e6)}};
    setitimer(ITIMER_REAL, &timer, nullptr);
}

inline int main(int argc, char** argv) {
    const char* only = argc > 1 ? argv[1] : "";
    int passed = 0;
    int failed = 0;
    int skipped = 0;
    const char* patience = std::getenv("TEST_PATIENCE");
    const double limit = limit_s * (patience ? std::atof(patience) : 1);
    // so that the output of a test that hangs is not lost
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    signal(SIGALRM, out_of_time);
    for (const Case& c : cases()) {
        if (!std::strstr(c.name, only))
            continue;
        failed_checks() = 0;
        const double start = now();
        std::string skip;
        last_words = format(
            "FAIL %s: no end after %g s; the tests behind it did not run\n%d passed, %d failed, "
            "%d skipped\n",
            c.name, limit, passed, failed + 1, skipped);
        set_timer(limit);
        try {
            c.run();
        } catch (const Skip& s) {
            skip = s.why;
        } catch (const std::exception& e) {
            report(c.name, 0, format("threw: %s", e.what()));
        }
        set_timer(0);
        if (failed_checks())
            failed++;
        else if (!skip.empty())
            skipped++;
        else
            passed++;
        std::printf("%s %s (%.1f s)%s%s\n",
                    failed_checks() ? "FAIL"
                    : skip.empty()  ? "ok  "
                                    : "skip",
                    c.name, now() - start, skip.empty() ? "" : ": ", skip.c_str());
        std::fflush(stdout);
    }
    if (passed + failed + skipped == 0) {
        std::printf("FAIL no test has \"%s\" in its name\n", only);
        failed = 1;
    }
    std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed ? 1 : 0;
}

}  // namespace test

#define TEST(name)                                             \
    static void test_##name();                                 \
    static test::Register register_##name(#name, test_##name); \
    static void test_##name()
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
