// log.jsonl: rows as JSON, appended one write(2) each.
#include "run/log.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "data/file.h"

namespace {

// Length of the valid UTF-8 sequence that starts at text[i] (Unicode 15, table 3-7), 0 if there is none.
size_t utf8_length(const std::string& text, size_t i) {
    const auto at = [&](size_t k) { return k < text.size() ? static_cast<unsigned char>(text[k]) : 0u; };
    const unsigned lead = at(i);
    if (lead < 0x80) return 1;
    const size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                          : (lead & 0xF0) == 0xE0        ? 3
                          : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                         : 0;
    for (size_t k = 1; k < length; k++)
        if ((at(i + k) & 0xC0) != 0x80) return 0;
    const unsigned second = at(i + 1);
    const bool bad = (lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) ||  // overlong; surrogates
                     (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F);    // overlong; past U+10FFFF
    return bad ? 0 : length;
}

// Calls f(ascii, bytes) for each character. `ascii` is its code, or −1 if it is not ASCII. `bytes` is its UTF-8, or ""
// for a byte that is not UTF-8. A byte-level model may well sample such bytes.
template <class F>
void for_each_character(const std::string& text, F f) {
    for (size_t i = 0; i < text.size();) {
        const size_t length = utf8_length(text, i);
        f(length == 1 ? text[i] : -1, text.substr(i, length));
        i += length ? length : 1;
    }
}

// A JSON string. Bytes that are not UTF-8 become U+FFFD.
std::string quoted(const std::string& text) {
    std::string out = "\"";
    for_each_character(text, [&](int ascii, const std::string& bytes) {
        if (ascii == '"' || ascii == '\\')
            out += '\\' + bytes;
        else if (ascii == '\n')
            out += "\\n";
        else if (ascii == '\t')
            out += "\\t";
        else if ((ascii >= 0 && ascii < 0x20) || ascii == 0x7F)
            out += format("\\u%04x", ascii);
        else
            out += bytes.empty() ? "\\ufffd" : bytes;
    });
    return out + "\"";
}

}  // namespace

std::string for_terminal(const std::string& text) {
    std::string out;
    for_each_character(text, [&](int ascii, const std::string& bytes) {
        const bool control = (ascii >= 0 && ascii < 0x20 && ascii != '\n' && ascii != '\t') || ascii == 0x7F ||
                             (bytes >= "\xC2\x80" && bytes <= "\xC2\x9F");  // U+0080 to U+009F
        out += control || bytes.empty() ? "\xEF\xBF\xBD" : bytes;
    });
    return out;
}

std::string take_for_terminal(std::string& text) {
    size_t end = text.size();
    while (end > 0 && text.size() - end < 3 && (text[end - 1] & 0xC0) == 0x80) end--;
    const bool begun = end > 0 && (text[end - 1] & 0xC0) == 0xC0 && utf8_length(text, end - 1) == 0;
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
    struct stat info;
    if (stat(path.c_str(), &info) || !S_ISREG(info.st_mode) || info.st_size == 0) return false;
    char last;
    InputFile(path).read(static_cast<uint64_t>(info.st_size) - 1, &last, 1);
    return last != '\n';
}

Log::Log(const std::string& path, bool append) : path_(path) {
    if (append && ends_inside_row(path)) truncate_after(path, std::numeric_limits<long long>::max());
    file_ = std::fopen(path.c_str(), "ae");
    if (!file_ || (!append && ftruncate(fileno(file_), 0))) throw file_error(path, "open", errno);
    std::setvbuf(file_, nullptr, _IONBF, 0);  // each row is one write(2), so that none is left to be written at exit
}

Log::~Log() {
    if (file_) std::fclose(file_);
}

void Log::write(const Row& row) {
    if (!file_) return;
    const std::string line = row.text() + "\n";
    struct stat before;
    const bool known = fstat(fileno(file_), &before) == 0 && S_ISREG(before.st_mode);
    if (std::fwrite(line.data(), 1, line.size(), file_) == line.size()) return;
    const int error = errno;
    // A full disk may have taken part of the row, and the rows before it must stay readable.
    if (known && ftruncate(fileno(file_), before.st_size))
        throw file_error(path_, "write (and its last row is cut)", error);
    throw file_error(path_, "write", error);
}

void Log::truncate_after(const std::string& path, long long step) {
    std::ifstream in(path, std::ios::binary);
    if (!in) {
        if (access(path.c_str(), F_OK)) return;  // no log yet
        throw file_error(path, "read", errno);
    }
    std::string kept;
    const std::string key = "\"step\": ";  // cannot be part of a string, because its quotes would be \" there
    for (std::string line; std::getline(in, line) && !in.eof();) {  // at eof a crash has cut a last line without \n
        const size_t at = line.find(key);
        if (at != std::string::npos && std::strtoll(line.c_str() + at + key.size(), nullptr, 10) > step) continue;
        kept += line + '\n';
    }
    if (in.bad()) throw file_error(path, "read", EIO);
    write_whole_file(path, {{kept.data(), kept.size()}});
}
