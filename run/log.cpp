// log.jsonl: rows as JSON, appended one write(2) each.
#include "run/log.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <sstream>

#include "data/file.h"
#include "data/tokenizer.h"

namespace {

// Calls f(code, bytes) for each character. `bytes` is its UTF-8, or "" for a byte that is not UTF-8. A byte-level model
// may well sample such bytes.
template <class F>
void for_each_character(const std::string& text, F f) {
    for (size_t i = 0; i < text.size();) {
        const Character c = character(text, i);
        f(c.code, text.substr(i, c.bytes));
        i += c.bytes ? c.bytes : 1;
    }
}

// A JSON string. Bytes that are not UTF-8 become U+FFFD.
std::string quoted(const std::string& text) {
    std::string out = "\"";
    for_each_character(text, [&](uint32_t code, const std::string& bytes) {
        if (code == '"' || code == '\\')
            out += '\\' + bytes;
        else if (code == '\n')
            out += "\\n";
        else if (code == '\t')
            out += "\\t";
        else if (code < 0x20 || code == 0x7F)
            out += format("\\u%04x", code);
        else
            out += bytes.empty() ? "\\ufffd" : bytes;
    });
    return out + "\"";
}

}  // namespace

std::string for_terminal(const std::string& text) {
    std::string out;
    for_each_character(text, [&](uint32_t code, const std::string& bytes) {
        const bool control = (code < 0x20 && code != '\n' && code != '\t') || (code >= 0x7F && code <= 0x9F);
        out += control || bytes.empty() ? "\xEF\xBF\xBD" : bytes;
    });
    return out;
}

std::string take_for_terminal(std::string& text) {
    size_t end = text.size();
    while (end > 0 && text.size() - end < 3 && (text[end - 1] & 0xC0) == 0x80) end--;
    const bool begun = end > 0 && (text[end - 1] & 0xC0) == 0xC0 && character(text, end - 1).bytes == 0;
    const std::string whole = for_terminal(text.substr(0, begun ? end - 1 : text.size()));
    text.erase(0, begun ? end - 1 : text.size());
    return whole;
}

Row::Row(const char* kind) : text_("{\"kind\": " + quoted(kind)) {}

Row& Row::put(const char* key, const std::string& json) {
    text_ += ", " + quoted(key) + ": " + json;
    return *this;
}
Row& Row::add(const char* key, const std::string& value) {
    return put(key, quoted(value));
}
Row& Row::add(const char* key, double value) {
    std::string number = "null";
    // The fewest digits that read back as the same double.
    for (int digits = 6; std::isfinite(value) && digits <= 17; digits++) {
        number = format("%.*g", digits, value);
        if (std::strtod(number.c_str(), nullptr) == value) break;
    }
    return put(key, number);
}

// True if a regular file ends inside a row, because its writer was cut off.
static bool ends_inside_row(const std::string& path) {
    std::error_code missing;
    if (!std::filesystem::is_regular_file(path, missing)) return false;
    const InputFile log(path);
    return log.size > 0 && log.rest(log.size - 1) != "\n";
}

static int open_to_append(const std::string& path, int flags = 0) {
    const int fd =
        uninterrupted([&] { return open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | flags, 0666); });
    if (fd < 0) throw file_error(path, "open", errno);
    return fd;
}

Log::Log(const std::string& path, bool append) : path_(path) {
    if (append && ends_inside_row(path)) truncate_after(path, std::numeric_limits<long long>::max());
    fd_ = open_to_append(path, append ? 0 : O_TRUNC);
}

Log::~Log() {
    if (fd_ >= 0) close(fd_);
}

void Log::write(const Row& row) {
    if (path_.empty()) return;
    pending_ += row.text() + "\n";
    retry();
}

void Log::retry() {
    if (pending_.empty()) return;
    struct stat before;
    const bool known = uninterrupted([&] { return fstat(fd_, &before); }) == 0 && S_ISREG(before.st_mode);
    if (fd_ < 0 || (known && !still_there(path_, fd_))) {
        std::fprintf(stderr, "%s: was removed or replaced while this run writes it; its rows go on in a new file\n",
                     path_.c_str());
        if (fd_ >= 0) close(fd_);
        fd_ = -1;
        fd_ = open_to_append(path_);
        before.st_size = lseek(fd_, 0, SEEK_END);
    }
    for (size_t done = 0; done < pending_.size();) {
        const ssize_t n = uninterrupted([&] { return ::write(fd_, pending_.data() + done, pending_.size() - done); });
        if (n >= 0) {
            done += static_cast<size_t>(n);
            continue;
        }
        const int error = errno;
        // A full disk may have taken part of the row, and the rows before it must stay readable.
        if (known && uninterrupted([&] { return ftruncate(fd_, before.st_size); }))
            throw file_error(path_, "write (and its last row is cut)", error);
        throw file_error(path_, "write", error);
    }
    pending_.clear();
}

// True if the line is an object in JSON without others inside, as rows are.
static bool is_row(const std::string& line) {
    const char* p = line.c_str();
    const auto blank = [&] {
        while (*p == ' ' || *p == '\t' || *p == '\r') p++;
    };
    const auto take = [&](const char* text) {
        const size_t n = std::strlen(text);
        const bool is = std::strncmp(p, text, n) == 0;
        if (is) p += n;
        return is;
    };
    const auto string = [&] {
        if (!take("\"")) return false;
        for (; *p != '"'; p++) {
            if (static_cast<unsigned char>(*p) < 0x20) return false;
            if (*p == '\\' && !std::strchr("\"\\/bfnrtu", *++p)) return false;
        }
        return take("\"");
    };
    const auto value = [&] {
        if (*p == '"') return string();
        if (take("null") || take("true") || take("false")) return true;
        const char* const begin = p;
        char* end = nullptr;
        std::strtod(p, &end);
        p = end;
        return p > begin && (*begin == '-' || std::isdigit(static_cast<unsigned char>(*begin)));
    };
    if (blank(), !take("{")) return false;
    do {
        if (blank(), !string()) return false;
        if (blank(), !take(":")) return false;
        if (blank(), !value()) return false;
        blank();
    } while (take(","));
    if (!take("}")) return false;
    return blank(), p == line.c_str() + line.size();
}

void Log::truncate_after(const std::string& path, long long step) {
    if (uninterrupted([&] { return access(path.c_str(), F_OK); })) return;  // no log yet
    std::istringstream in(InputFile(path).rest());
    std::string kept;
    const std::string key = "\"step\": ";  // cannot be part of a string, because its quotes would be \" there
    size_t number = 0;
    for (std::string line; std::getline(in, line) && !in.eof();) {  // at eof a crash has cut a last line without \n
        number++;
        if (!is_row(line)) std::fprintf(stderr, "%s: line %zu is no JSON; it stays as it is\n", path.c_str(), number);
        const size_t at = line.find(key);
        if (at != std::string::npos && std::strtoll(line.c_str() + at + key.size(), nullptr, 10) > step) continue;
        kept += line + '\n';
    }
    write_whole_file(path, {{kept.data(), kept.size()}});
}
