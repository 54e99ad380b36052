// Errors are exceptions. main prints their one line on stderr and exits. A message says what, where (file, offset,
// expected, found) and what to do about it.
#pragma once
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

// Runs the body of a main and returns its exit code. It prints an error's one line to stderr behind the program's name.
template <class F>
int run_program(const char* name, F body) {
    try {
        return body();
    } catch (const UsageError& e) {
        std::fprintf(stderr, "%s: %s\n", name, e.what());
        return 2;
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s: %s\n", name, e.what());
        return 1;
    }
}

// printf into a std::string.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, fmt, args)), '\0');
    va_end(args);
    std::vsnprintf(text.data(), text.size() + 1, fmt, again);
    va_end(again);
    return text;
}
