// Errors are exceptions. main prints their one line on stderr and exits. A message says what, where
// (file, offset, expected, found) and what to do about it.
#pragma once
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

struct Error : std::runtime_error {  // exit code 1
    using std::runtime_error::runtime_error;
};
struct UsageError : Error {  // exit code 2, for a wrong command line
    using Error::Error;
};
inline int exit_code_of(const std::exception& e) {
    return dynamic_cast<const UsageError*>(&e) ? 2 : 1;
}

// A line on stderr in one piece. printf writes in several, between which lines of other ranks may
// come.
inline void print_error(const std::string& line) {
    std::fputs((line + "\n").c_str(), stderr);
}

// Runs the body of a main and returns its exit code. It prints an error's one line to stderr behind
// the program's name.
template <class F>
int run_program(const char* name, const F& body) {
    try {
        return body();
    } catch (const std::exception& e) {
        print_error(std::string(name) + ": " + e.what());
        return exit_code_of(e);
    }
}

inline double now() {  // in seconds
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// printf into a std::string.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* fmt, ...) {
    va_list args;
    va_list again;
    va_start(args, fmt);
    va_copy(again, args);
    std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, fmt, args)), '\0');
    va_end(args);
    std::vsnprintf(text.data(), text.size() + 1, fmt, again);
    va_end(again);
    return text;
}
