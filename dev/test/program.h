// Helpers for tests that run ./train_gpt2cu as its users do: as a subprocess, whose output, exit
// code and files are checked.
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
#include "data/tokenizer.h"
#include "dev/common/test.h"
#include "run/choices.h"
#include "run/settings.h"

struct Result {
    int code;         // where signal n counts as 128 + n
    std::string out;  // stdout and stderr
};

// -------------------------------------------------------------------------------------------------
// Text and files

// A text from the first `key` on, "" if there is none.
inline std::string text_from(const std::string& text, const std::string& key) {
    const size_t at = text.find(key);
    return at == std::string::npos ? "" : text.substr(at);
}

// The number after the last `key`, NaN if there is none.
inline double number_after(const std::string& text, const std::string& key) {
    const size_t at = text.rfind(key);
    return at == std::string::npos ? NAN : std::atof(text.c_str() + at + key.size());
}

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

inline bool exists(const std::string& path) {
    return access(path.c_str(), F_OK) == 0;
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

// -------------------------------------------------------------------------------------------------
// Running the program

// Runs a command with nothing on stdin. `see`, if given, is called with each line as it arrives.
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

// Tests start from common options and change some, but the program refuses an option that is given
// twice. So this keeps the last of each, with the words after it, which are its value. The first
// word that contains ; or | or &, and all words after it, are for the shell and stay as they are.
inline std::string given_once(const std::string& arguments) {
    static const std::regex word("(?:[^ '\"]|'[^']*'|\"[^\"]*\")+");
    const std::vector<Option> table = Options().table();
    std::string before_options;
    std::map<std::string, std::string> given;  // by the option's name: the option and its value
    std::string after_options;
    std::string* destination = &before_options;  // which the next word is appended to
    for (std::sregex_iterator at(arguments.begin(), arguments.end(), word);
         at != std::sregex_iterator(); ++at) {
        const std::string text = at->str();
        const std::string name = text.substr(0, text.find('='));
        if (text.find_first_of(";|&") != std::string::npos)
            destination = &after_options;
        if (destination == &after_options) {
            after_options += text + " ";
            continue;
        }

        const auto is_this = [&](const Option& option) {
            return name == option.name || name == option.letter;
        };
        const auto option = std::find_if(table.begin(), table.end(), is_this);
        if (option != table.end()) {
            destination = &given[option->name];
            destination->clear();  // if it was given before
        }
        *destination += text + " ";
    }

    std::string once = before_options;
    for (const auto& [name, text] : given)
        once += text;
    return once + after_options;
}

// The program with these arguments. Without GPUs several ranks are the threads of
// dev/train_threads. --memory starts no ranks.
inline std::string command(const std::string& arguments) {
    const bool threads = contains(arguments, "--device cpu") && contains(arguments, "--gpus") &&
                         !contains(arguments, "--memory");
    return (threads ? "./dev/train_threads " : "./train_gpt2cu ") + given_once(arguments);
}

inline Result run(const std::string& arguments) {
    return shell(command(arguments));
}

// Runs the program, and `action` in a shell as soon as a line begins with `sign`. In the action,
// $pid is the program, which is stopped meanwhile, and $(ranks) are its ranks. The result has the
// output of both. `before` is a command that starts the program as its child: then $pid is that
// command, which is stopped, and $(ranks) is the program, which is not.
inline Result run_and_act(const std::string& arguments, const std::string& sign,
                          const std::string& action, const std::string& before = "") {
    pid_t pid = 0;  // the shell prints it as the first line
    bool acted = false;
    std::string said;
    Result r = shell("echo $$; exec " + before + command(arguments), [&](const std::string& line) {
        if (pid == 0)
            pid = std::atoi(line.c_str());
        const bool is_sign = line.compare(0, sign.size(), sign) == 0;
        if (acted || !is_sign)
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

// Whoever started this test may have made it ignore signals, and the program would ignore them too.
inline void stop_ignoring_signals() {
    for (const int s : {SIGINT, SIGTERM, SIGHUP})
        signal(s, SIG_DFL);
}

// The message of the Error that `code` throws, or "". What `code` prints is discarded.
template <class F>
std::string quiet_error_of(F code) {
    std::fflush(stdout);
    const int screen = dup(STDOUT_FILENO);
    CHECK(std::freopen("/dev/null", "w", stdout) != nullptr);
    const std::string error = test::error_of(code);
    std::fflush(stdout);
    dup2(screen, STDOUT_FILENO);
    close(screen);
    return error;
}

// Checks a run's exit code, and that its output has all these parts.
inline void check_run(const char* file, int line, const Result& r, int code,
                      const std::vector<std::string>& parts) {
    std::string wanted = format("exit %d", code);
    bool ok = r.code == code;
    for (const std::string& part : parts) {
        ok &= contains(r.out, part);
        wanted += " and \"" + part + "\"";
    }
    if (ok)
        return;
    const size_t shown = std::min<size_t>(r.out.size(), 600);
    test::report(file, line,
                 format("expected %s, got exit %d and: %s", wanted.c_str(), r.code,
                        r.out.substr(r.out.size() - shown).c_str()));
}
#define CHECK_RUN(result, exit_code, ...) \
    check_run(__FILE__, __LINE__, result, exit_code, {__VA_ARGS__})

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

// -------------------------------------------------------------------------------------------------
// What a run reads

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

template <class T>
std::string bytes_of(const std::vector<T>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// llm.c's files begin with 256 int32: a magic number, a version, then what the kind of file needs.
inline std::string header_of(std::vector<int32_t> numbers) {
    numbers.resize(256);
    return bytes_of(numbers);
}

// Writes a shard of tokens. A vocabulary of bytes has <|endoftext|> at 256, but a shard stores it
// as GPT-2's 50256.
inline std::string write_shard(const std::string& path, const std::vector<int>& tokens) {
    std::vector<uint16_t> stored;
    for (int token : tokens)
        stored.push_back(static_cast<uint16_t>(token == 256 ? 50256 : token));
    write_file(path,
               header_of({20240520, 1, static_cast<int32_t>(tokens.size())}) + bytes_of(stored));
    return path;
}

// llm.c's tokenizer file. The last piece is <|endoftext|>.
inline std::string tokenizer_file(int version, const std::vector<std::string>& pieces) {
    const int count = static_cast<int>(pieces.size());
    std::string bytes = header_of({20240328, version, count, version == 2 ? count - 1 : 0});
    for (const std::string& piece : pieces)
        bytes += static_cast<char>(piece.size()) + piece;
    return bytes;
}

// Writes a tokenizer of all single bytes and then these tokens, as GPT-2 numbers them. A token's id
// is the rank of the merge that makes it.
inline std::string write_tokenizer(const std::string& path,
                                   const std::vector<std::string>& merges) {
    std::vector<std::string> pieces(256);
    for (int byte = 0; byte < 256; byte++) {
        const std::string one(1, static_cast<char>(byte));
        pieces[encode_bytes(one)[0]] = one;
    }
    pieces.insert(pieces.end(), merges.begin(), merges.end());
    pieces.push_back("<|endoftext|>");
    write_file(path, tokenizer_file(2, pieces));
    return path;
}

// Writes questions in the format of run/choices.h: a header, then an example for each question,
// which begins with five numbers. Each text has its length before its tokens.
inline void write_questions(const std::string& path, const std::vector<Question>& questions) {
    constexpr uint16_t kStart = 65535;
    int32_t longest = 0;
    std::vector<uint16_t> all;
    for (const Question& q : questions) {
        std::vector<uint16_t> texts;
        const auto append = [&](const std::vector<int>& text) {
            texts.push_back(static_cast<uint16_t>(text.size()));
            texts.insert(texts.end(), text.begin(), text.end());
        };
        append(q.context);
        for (const std::vector<int>& ending : q.endings)
            append(ending);

        const size_t bytes = 2 * (5 + texts.size());
        longest = std::max<int32_t>(longest, static_cast<int32_t>(bytes));
        for (const size_t number :
             {size_t(kStart), bytes, size_t(q.index), size_t(q.label), q.endings.size()})
            all.push_back(static_cast<uint16_t>(number));
        all.insert(all.end(), texts.begin(), texts.end());
    }
    const auto count = static_cast<int32_t>(questions.size());
    write_file(path, header_of({20240522, 1, count, longest}) + bytes_of(all));
}

// -------------------------------------------------------------------------------------------------
// What a run logs

// The rows of this kind in the log of the run whose folder is `out`.
inline std::vector<std::string> rows(const std::string& out, const std::string& kind) {
    std::vector<std::string> found;
    std::istringstream log(read_file(out + "/log.jsonl"));
    for (std::string line; std::getline(log, line);)
        if (line.find("{\"kind\": \"" + kind + "\"") == 0)
            found.push_back(line);
    return found;
}

// A number of a row, by its key.
inline double value(const std::string& row, const std::string& key) {
    return number_after(row, "\"" + key + "\": ");
}

// That number in each row of a kind.
inline std::vector<double> values(const std::string& out, const std::string& kind,
                                  const std::string& key) {
    std::vector<double> found;
    for (const std::string& row : rows(out, kind))
        found.push_back(value(row, key));
    return found;
}
