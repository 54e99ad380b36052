#include "run/log.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
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

std::string minutes(double seconds) {
    return format("%.0f:%02.0f", std::floor(seconds / 60), std::floor(std::fmod(seconds, 60)));
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

Log::Log(const std::string& path, bool append) : path_(path) {
    const int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | (append ? 0 : O_TRUNC);
    fd_ = uninterrupted([&] { return open(path.c_str(), flags, 0666); });
    if (fd_ < 0) throw file_error(path, "open", errno);
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
    for (size_t done = 0; done < pending_.size();) {
        const ssize_t n = uninterrupted([&] { return ::write(fd_, pending_.data() + done, pending_.size() - done); });
        if (n < 0) {
            // A full disk may have taken part of the row, and the rows before it must stay readable.
            const Error error = file_error(path_, "write", errno);
            if (known) uninterrupted([&] { return ftruncate(fd_, before.st_size); });
            throw error;
        }
        done += static_cast<size_t>(n);
    }
    pending_.clear();
}

void Log::truncate_after(const std::string& path, long long step) {
    if (uninterrupted([&] { return access(path.c_str(), F_OK); })) return;  // no log yet
    std::istringstream in(InputFile(path).rest());
    std::string kept;
    const std::string key = "\"step\": ";  // cannot be part of a string, because its quotes would be \" there
    for (std::string line; std::getline(in, line) && !in.eof();) {  // at eof a crash has cut a last line without \n
        const size_t at = line.find(key);
        if (at != std::string::npos && std::strtoll(line.c_str() + at + key.size(), nullptr, 10) > step) continue;
        kept += line + '\n';
    }
    write_whole_file(path, {{kept.data(), kept.size()}});
}
