// Errors are exceptions. main prints their message on stderr, in one line, and exits. A message
// says what is wrong, where (file, offset, expected, found) and what to do about it.
//
// Also two functions that messages need: a clock, and printf into a string.
#pragma once
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

struct Error : std::runtime_error {  // exit code 1
    using std::runtime_error::runtime_error;
};

struct UsageError : Error {  // a wrong command line, exit code 2
    using Error::Error;
};

inline int exit_code_of(const std::exception& e) {
    return dynamic_cast<const UsageError*>(&e) ? 2 : 1;
}

// Writes a line to stderr by one call. printf makes several, between which other ranks can write.
inline void print_error(const std::string& line) {
    std::fputs((line + "\n").c_str(), stderr);
}

// Runs the body of a program's main and returns its exit code. If it throws, the message is printed
// after the program's name.
template <class F>
int run_program(const char* name, const F& body) {
    try {
        return body();
    } catch (const std::exception& e) {
        print_error(std::string(name) + ": " + e.what());
        return exit_code_of(e);
    }
}

// Seconds since some fixed time, by a clock that nobody sets.
inline double now() {
    const std::chrono::duration<double> seconds =
        std::chrono::steady_clock::now().time_since_epoch();
    return seconds.count();
}

// printf into a std::string.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* fmt, ...) {
    va_list args;
    va_list args_again;
    va_start(args, fmt);
    va_copy(args_again, args);
    const int length = std::vsnprintf(nullptr, 0, fmt, args);
    va_end(args);

    std::string text(static_cast<size_t>(length), '\0');
    std::vsnprintf(text.data(), text.size() + 1, fmt, args_again);
    va_end(args_again);
    return text;
}
