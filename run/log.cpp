#include "run/log.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "data/file.h"
#include "data/tokenizer.h"

namespace {

// Calls f(code, bytes) for each character. `bytes` is its UTF-8, or "" for a byte that is not
// UTF-8, which a byte-level model may well sample.
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

// Tells whether a line is a JSON object (RFC 8259). It only parses the line and builds nothing. The
// private functions read what they are named after and return whether it is there.
class JsonCheck {
  public:
    explicit JsonCheck(const std::string& text) : text_(text) {}

    bool is_object() {
        skip_space();
        const bool object = next_is('{') && value(0);
        skip_space();
        return object && at_ == text_.size();
    }

  private:
    bool value(int depth) {
        constexpr int kMostDepth = 100;  // our rows have a depth of one
        skip_space();
        if (depth > kMostDepth || at_ == text_.size())
            return false;
        switch (text_[at_]) {
            case '{':
                return members(
                    '}', [&] { return string() && take_after_space(':') && value(depth + 1); });
            case '[': return members(']', [&] { return value(depth + 1); });
            case '"': return string();
            default: return word("true") || word("false") || word("null") || number();
        }
    }

    // The members of an object or an array, with commas between them, from the opening bracket to
    // the closing one.
    template <class Member>
    bool members(char end, Member member) {
        at_++;
        if (take_after_space(end))
            return true;
        while (member()) {
            if (take_after_space(end))
                return true;
            if (!take_after_space(','))
                return false;
        }
        return false;
    }

    bool string() {
        if (!take_after_space('"'))
            return false;
        while (at_ < text_.size() && text_[at_] != '"') {
            if (text_[at_] == '\\') {
                if (!escape())
                    return false;
                continue;
            }
            const Character c = character(text_, at_);
            if (c.bytes == 0 || c.code < 0x20)
                return false;
            at_ += c.bytes;
        }
        return take('"');
    }

    bool escape() {
        take('\\');
        if (take('u')) {
            for (int i = 0; i < 4; i++) {
                if (at_ == text_.size() || !std::isxdigit(text_[at_] & 0xFF))
                    return false;
                at_++;
            }
            return true;
        }
        for (const char c : {'"', '\\', '/', 'b', 'f', 'n', 'r', 't'})
            if (take(c))
                return true;
        return false;
    }

    bool number() {
        take('-');
        if (!take('0') && !digits())
            return false;
        if (take('.') && !digits())
            return false;
        if (!take('e') && !take('E'))
            return true;
        if (!take('-'))
            take('+');
        return digits();
    }

    bool digits() {
        const size_t begin = at_;
        while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9')
            at_++;
        return at_ > begin;
    }

    bool word(const char* word) {
        const size_t length = std::strlen(word);
        if (text_.compare(at_, length, word) != 0)
            return false;
        at_ += length;
        return true;
    }

    bool next_is(char c) const { return at_ < text_.size() && text_[at_] == c; }

    // Reads c if it is next, and returns whether it was.
    bool take(char c) {
        if (!next_is(c))
            return false;
        at_++;
        return true;
    }

    bool take_after_space(char c) {
        skip_space();
        return take(c);
    }

    void skip_space() {
        while (next_is(' ') || next_is('\t') || next_is('\r'))
            at_++;
    }

    const std::string& text_;
    size_t at_ = 0;
};

// What truncate_after() keeps of a log.
struct KeptRows {
    std::string text;
    int damaged = 0;  // rows that are not JSON
};
KeptRows rows_until(const std::string& log, long long step) {
    // No string in a row contains this, because quotes are escaped there.
    const std::string key = "\"step\": ";

    KeptRows kept;
    bool is_later = false;  // a row without a step, such as "run", belongs to the row before it
    for (size_t begin = 0, end = 0; begin < log.size(); begin = end + 1) {
        end = std::min(log.find('\n', begin), log.size());
        const std::string row = log.substr(begin, end - begin);
        if (!JsonCheck(row).is_object()) {
            kept.damaged++;
            continue;
        }
        const size_t at = row.find(key);
        if (at != std::string::npos)
            is_later = std::strtoll(row.c_str() + at + key.size(), nullptr, 10) > step;
        if (!is_later)
            kept.text += row + '\n';
    }
    return kept;
}

void append_newline(const std::string& path) {
    const HeldFile file(path, O_WRONLY | O_APPEND, "");
    if (uninterrupted([&] { return ::write(file.fd, "\n", 1); }) != 1)
        throw file_error(path, "write", errno);
}

void truncate_file(const std::string& path, size_t bytes) {
    const int fd = uninterrupted([&] { return ::open(path.c_str(), O_WRONLY | O_CLOEXEC); });
    if (fd < 0)
        throw file_error(path, "open", errno);
    const off_t length = static_cast<off_t>(bytes);
    const int error = uninterrupted([&] { return ftruncate(fd, length); }) ? errno : 0;
    close(fd);
    if (error)
        throw file_error(path, "truncate", error);
}

}  // namespace

std::string for_terminal(const std::string& text) {
    std::string out;
    for_each_character(text, [&](uint32_t code, const std::string& bytes) {
        const bool control =
            (code < 0x20 && code != '\n' && code != '\t') || (code >= 0x7F && code <= 0x9F);
        out += (control || bytes.empty()) ? "\xEF\xBF\xBD" : bytes;
    });
    return out;
}

std::string take_for_terminal(std::string& text) {
    // In UTF-8 a character of several bytes starts with 11…, and its other bytes with 10…
    const auto starts_character = [&](size_t i) { return (text[i] & 0xC0) == 0xC0; };
    const auto continues_character = [&](size_t i) { return (text[i] & 0xC0) == 0x80; };

    if (text.empty())
        return "";
    // The last character's first byte, which at most three others follow.
    size_t last = text.size() - 1;
    while (last > 0 && text.size() - last <= 3 && continues_character(last))
        last--;
    const bool incomplete = starts_character(last) && character(text, last).bytes == 0;
    const size_t complete = incomplete ? last : text.size();
    const std::string result = for_terminal(text.substr(0, complete));
    text.erase(0, complete);
    return result;
}

void TextPrinter::print(const std::string& piece) {
    waiting_ += piece;
    const std::string text = terminal_ ? take_for_terminal(waiting_) : std::exchange(waiting_, "");
    std::fwrite(text.data(), 1, text.size(), stdout);  // not fputs: there may be zeros
}

void TextPrinter::end() {
    const std::string text = for_terminal(std::exchange(waiting_, ""));
    std::fputs(text.c_str(), stdout);
}

void print_text(const std::string& text) {
    TextPrinter printer;
    printer.print(text);
    printer.end();
}

std::string minutes(double seconds) {
    return format("%.0f:%02.0f", std::floor(seconds / 60), std::floor(std::fmod(seconds, 60)));
}

// -------------------------------------------------------------------------------------------------

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
        if (std::strtod(number.c_str(), nullptr) == value)
            break;
    }
    return put(key, number);
}

void Log::open(const std::string& path, bool append) {
    const int flags = O_WRONLY | O_APPEND | O_CREAT | (append ? 0 : O_TRUNC);
    file_ = std::make_unique<HeldFile>(path, flags, "rows are still written to the old file");
}

void Log::write(const Row& row) {
    if (!file_)
        return;
    pending_ += row.text() + "\n";
    retry();
}

void Log::retry() {
    write_pending();
    if (const int error = sync_error_.exchange(0))
        throw file_error(file_->path, "sync", error);
}

void Log::sync() {
    if (file_ && uninterrupted([&] { return fsync(file_->fd); }) && errno != EINVAL)
        sync_error_ = errno;  // EINVAL: the file system has nothing to sync
}

void Log::warn_if_replaced() {
    if (file_)
        file_->warn_if_replaced();
}

void Log::write_pending() {
    if (pending_.empty())
        return;
    const int fd = file_->fd;
    struct stat before;
    const bool size_is_known =
        uninterrupted([&] { return fstat(fd, &before); }) == 0 && S_ISREG(before.st_mode);

    for (size_t done = 0; done < pending_.size();) {
        const ssize_t n = uninterrupted(
            [&] { return ::write(fd, pending_.data() + done, pending_.size() - done); });
        if (n < 0) {
            // Removes what a full disk has accepted of these rows, so that the file ends in a whole
            // one.
            const Error error = file_error(file_->path, "write", errno);
            if (size_is_known)
                uninterrupted([&] { return ftruncate(fd, before.st_size); });
            throw error;
        }
        done += static_cast<size_t>(n);
    }
    pending_.clear();
}

void Log::truncate_after(const std::string& path, long long step) {
    if (uninterrupted([&] { return access(path.c_str(), F_OK); })) {
        if (errno == ENOENT)
            return;  // no log yet
        throw file_error(path, "find", errno);
    }
    const std::string text = InputFile(path).read_all();
    const auto [kept, damaged] = rows_until(text, step);
    if (damaged > 0)
        print_error(format("warning: %s: dropped %d %s not JSON", path.c_str(), damaged,
                           damaged == 1 ? "row that was" : "rows that were"));

    if (kept == text)
        return;
    const bool only_newline_is_missing = kept == text + '\n';
    if (only_newline_is_missing)
        return append_newline(path);
    if (text.starts_with(kept))
        return truncate_file(path, kept.size());
    // A row to keep follows a row to drop. A new file takes the old one's name, or if the path is a
    // link, the name of the file it leads to.
    const std::string file = std::filesystem::canonical(path);
    write_whole_file(file, {{kept.data(), kept.size()}});
}
