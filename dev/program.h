// Helpers for tests that run ./train_gpt2cu as its users do. They start it as a subprocess and check its output, exit
// code and files.
#pragma once
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "data/corpus.h"
#include "dev/test.h"

struct Result {
    int code;
    std::string out;  // stdout and stderr
};

// A scratch folder, removed at exit.
inline const std::string& dir() {
    static const struct Scratch {
        std::string path = "/tmp/train_gpt2cu_test.XXXXXX";
        Scratch() {
            if (!mkdtemp(path.data())) throw Error("cannot create " + path);
        }
        ~Scratch() {
            std::error_code ignored;
            std::filesystem::remove_all(path, ignored);
        }
    } scratch;
    return scratch.path;
}

inline std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}
inline void write_file(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
}

inline Result shell(const std::string& command) {
    Result r{-1, ""};
    FILE* pipe = popen(("{ " + command + "; } 2>&1").c_str(), "r");
    char buffer[4096];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) r.out.append(buffer, n);
    const int status = pclose(pipe);
    r.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return r;
}
inline Result run(const std::string& arguments) {
    return shell("./train_gpt2cu " + arguments);
}

// A small text to train on, so that a run takes a moment.
inline std::string text_file() {
    static const std::string path = [] {
        std::string text;
        for (int i = 0; i < 100; i++) text += write_story(5, i).text;
        write_file(dir() + "/stories.txt", text);
        return dir() + "/stories.txt";
    }();
    return path;
}
// Options of a run of about a second.
inline std::string tiny() {
    return "--device cpu -e tiny -b 2 -t 64 -v 0 -s 0 -i " + text_file() + " ";
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}
// The part of a line from `key` up to the next space.
inline double number_after(const std::string& text, const std::string& key) {
    const size_t at = text.rfind(key);
    return at == std::string::npos ? NAN : std::atof(text.c_str() + at + key.size());
}
inline bool exists(const std::string& path) {
    return access(path.c_str(), F_OK) == 0;
}
inline bool has_gpu() {
    return !contains(run("-x 0 -s 0 -v 0 -i " + text_file() + " -e tiny -t 64").out, "no usable GPU");
}

#define CHECK_RUN(result, exit_code, part)                                                                    \
    do {                                                                                                      \
        const Result r_ = (result);                                                                           \
        if (r_.code != (exit_code) || !contains(r_.out, part))                                                \
            test::report(__FILE__, __LINE__,                                                                  \
                         format("expected exit %d and \"%s\", got exit %d and: %s", exit_code, part, r_.code, \
                                r_.out.substr(r_.out.size() > 600 ? r_.out.size() - 600 : 0).c_str()));       \
    } while (0)
