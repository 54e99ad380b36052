// Helpers for tests that run ./train_gpt2cu as its users do. They start it as a subprocess and
// check its output, exit code and files.
#pragma once
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "data/corpus.h"
#include "dev/common/test.h"
#include "run/choices.h"
#include "run/settings.h"

struct Result {
    int code;
    std::string out;  // stdout and stderr
};

// A scratch folder, removed at exit.
inline const std::string& dir() {
    static const struct Scratch {
        std::string path = "/tmp/train_gpt2cu_test.XXXXXX";
        Scratch() {
            if (!mkdtemp(path.data()))
                throw Error("cannot create " + path);
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

// Runs a command without a terminal. `see`, if given, sees each line as it comes.
inline Result shell(const std::string& command,
                    const std::function<void(const std::string& line)>& see = nullptr) {
    Result r{-1, ""};
    FILE* pipe = popen(("{ " + command + "; } 2>&1 </dev/null").c_str(), "r");
    char* line = nullptr;
    size_t room = 0;
    for (ssize_t n; (n = getline(&line, &room, pipe)) > 0;) {
        r.out.append(line, n);
        if (see)
            see(std::string(line, n));
    }
    std::free(line);
    const int status = pclose(pipe);
    r.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return r;
}
// Tests begin with common options and change some. The program refuses one that is given twice, so
// the last one counts. The words behind an option belong to it. From a ; or a | or an & on all
// stays as it is.
inline std::string given_once(const std::string& arguments) {
    static const std::regex word("(?:[^ '\"]|'[^']*'|\"[^\"]*\")+");
    const std::vector<Option> table = Options().table();
    std::map<std::string, std::string> given;
    std::string first;
    std::string rest;
    std::string* last = &first;
    for (std::sregex_iterator at(arguments.begin(), arguments.end(), word);
         at != std::sregex_iterator(); ++at) {
        const std::string text = at->str();
        const std::string name = text.substr(0, text.find('='));
        if (text.find_first_of(";|&") != std::string::npos)
            last = &rest;
        for (const Option& option : table)
            if (last != &rest && (name == option.name || name == option.letter)) {
                last = &given[option.name];
                last->clear();
            }
        *last += text + " ";
    }
    for (const auto& [name, text] : given)
        first += text;
    return first + rest;
}
// The program. Several ranks without a GPU are the threads of dev/train_threads.
inline std::string command(const std::string& arguments) {
    const bool threads = arguments.find("--device cpu") != std::string::npos &&
                         arguments.find("--gpus") != std::string::npos &&
                         arguments.find("--memory") == std::string::npos;
    return (threads ? "./dev/train_threads " : "./train_gpt2cu ") + given_once(arguments);
}
inline Result run(const std::string& arguments) {
    return shell(command(arguments));
}
// Runs the program, and `action` in a shell as soon as a line begins with `sign`. In it $pid is the
// program, which stands still meanwhile, and $(ranks) are its ranks. The result has what both
// print. `before` is a command that starts it.
inline Result run_and_act(const std::string& arguments, const std::string& sign,
                          const std::string& action, const std::string& before = "") {
    pid_t pid = 0;
    bool acted = false;
    std::string said;
    Result r = shell("echo $$; exec " + before + command(arguments), [&](const std::string& line) {
        if (!pid)
            pid = std::atoi(line.c_str());
        if (acted || line.compare(0, sign.size(), sign))
            return;
        acted = kill(pid, SIGSTOP) == 0;
        said = shell(format("pid=%d; ranks() { pgrep -P $pid; }; ", pid) + action).out;
        kill(pid, SIGCONT);
    });
    if (!acted)
        test::report(__FILE__, __LINE__, "no line begins with \"" + sign + "\": " + r.out);
    r.out += said;
    return r;
}

// The message of the Error that `code` throws, or "". What it prints is not seen.
template <class F>
std::string quiet_error_of(F code) {
    std::fflush(stdout);
    const int screen = dup(1);
    CHECK(std::freopen("/dev/null", "w", stdout) != nullptr);
    const std::string error = test::error_of(code);
    std::fflush(stdout);
    dup2(screen, 1), close(screen);
    return error;
}

// A small text to train on, so that a run takes a moment.
inline std::string text_file() {
    static const std::string path = [] {
        std::string text;
        for (int i = 0; i < 100; i++)
            text += write_story(5, i);
        write_file(dir() + "/stories.txt", text);
        return dir() + "/stories.txt";
    }();
    return path;
}
// Options of a run of about a second.
inline std::string tiny() {
    return "--device cpu -e tiny -b 2 -t 64 -v 0 -s 0 -i " + text_file() + " ";
}

// The program's options after these arguments.
inline Options options_of(const std::vector<std::string>& arguments) {
    Options o;
    std::vector<Option> table = o.table();
    std::vector<const char*> words = {"train_gpt2cu"};
    for (const std::string& argument : arguments)
        words.push_back(argument.c_str());
    parse_options(static_cast<int>(words.size()), words.data(), table);
    return o;
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}
// The number behind the last `key`, NaN if there is none.
inline double number_after(const std::string& text, const std::string& key) {
    const size_t at = text.rfind(key);
    return at == std::string::npos ? NAN : std::atof(text.c_str() + at + key.size());
}
// The rows of a kind in the log of the run whose folder is `out`, a number in a row, and that
// number in each row.
inline std::vector<std::string> rows(const std::string& out, const std::string& kind) {
    std::vector<std::string> found;
    std::istringstream log(read_file(out + "/log.jsonl"));
    for (std::string line; std::getline(log, line);)
        if (line.find("{\"kind\": \"" + kind + "\"") == 0)
            found.push_back(line);
    return found;
}
inline double value(const std::string& row, const std::string& key) {
    return number_after(row, "\"" + key + "\": ");
}
inline std::vector<double> values(const std::string& out, const std::string& kind,
                                  const std::string& key) {
    std::vector<double> found;
    for (const std::string& row : rows(out, kind))
        found.push_back(value(row, key));
    return found;
}
template <class T>
std::string bytes_of(const std::vector<T>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}
// llm.c's files begin with 256 int32.
inline std::string header_of(std::vector<int32_t> numbers) {
    numbers.resize(256);
    return bytes_of(numbers);
}
// A shard of tokens. 256, the end of a text in a vocabulary of bytes, is stored as GPT-2's.
inline std::string write_shard(const std::string& path, const std::vector<int>& tokens) {
    std::vector<uint16_t> stored;
    for (int token : tokens)
        stored.push_back(static_cast<uint16_t>(token == 256 ? 50256 : token));
    write_file(path,
               header_of({20240520, 1, static_cast<int32_t>(tokens.size())}) + bytes_of(stored));
    return path;
}

// Questions in the format of run/choices.h.
inline void write_choices(const std::string& path, const std::vector<Choice>& choices) {
    std::vector<int32_t> header = {20240522, 1, static_cast<int32_t>(choices.size()), 0};
    std::vector<uint16_t> all;
    for (const Choice& c : choices) {
        std::vector<uint16_t> one = {65535, 0, uint16_t(c.index), uint16_t(c.label),
                                     uint16_t(c.endings.size())};
        std::vector<std::vector<int>> texts = c.endings;
        texts.insert(texts.begin(), c.context);
        for (const std::vector<int>& text : texts) {
            one.push_back(static_cast<uint16_t>(text.size()));
            one.insert(one.end(), text.begin(), text.end());
        }
        one[1] = static_cast<uint16_t>(2 * one.size());
        header[3] = std::max<int32_t>(header[3], one[1]);
        all.insert(all.end(), one.begin(), one.end());
    }
    write_file(path, header_of(header) + bytes_of(all));
}
inline bool exists(const std::string& path) {
    return access(path.c_str(), F_OK) == 0;
}

// Checks a run's exit code, and that its output has all these parts.
inline void check_run(const char* file, int line, const Result& r, int code,
                      const std::vector<std::string>& parts) {
    std::string wanted;
    bool ok = r.code == code;
    for (const std::string& part : parts) {
        ok &= contains(r.out, part);
        wanted += (wanted.empty() ? "\"" : " and \"") + part + "\"";
    }
    if (!ok)
        test::report(
            file, line,
            format("expected exit %d and %s, got exit %d and: %s", code, wanted.c_str(), r.code,
                   r.out.substr(r.out.size() > 600 ? r.out.size() - 600 : 0).c_str()));
}
#define CHECK_RUN(result, exit_code, ...) \
    check_run(__FILE__, __LINE__, result, exit_code, {__VA_ARGS__})
