// Text files, and names in commands.
#include "data/text.h"

#include <cstring>
#include <string_view>

#include "common/error.h"
#include "data/tokenizer.h"

using namespace std::string_view_literals;

void check_is_text(const std::string& text, const std::string& path) {
    static const struct {
        size_t at;
        std::string_view bytes;
        const char *what, *advice;
    } known[] = {
        {0, "\x93NUMPY"sv, "a NumPy array", "write its ids as token shards"},
        {7, "\0{"sv, "safetensors",
         "give text or token shards; scripts/hf.py import reads a model"},
        {0, "\xFF\xFE\0\0"sv, "UTF-32 text", "convert it to UTF-8"},
        {0, "\0\0\xFE\xFF"sv, "UTF-32 text", "convert it to UTF-8"},
        {0, "\xFF\xFE"sv, "UTF-16 text", "convert it to UTF-8"},
        {0, "\xFE\xFF"sv, "UTF-16 text", "convert it to UTF-8"},
        {0, "\x1F\x8B"sv, "gzip", "unpack it"},
        {0, "BZh"sv, "bzip2", "unpack it"},
        {0, "\xFD\x37zXZ"sv, "xz", "unpack it"},
        {0, "\x28\xB5\x2F\xFD"sv, "zstd", "unpack it"},
        {0, "PK\3\4"sv, "a zip archive", "unpack it"},
        {0, "PAR1"sv, "Parquet", "let data/prepare.py make token shards of it"},
        {0, "%PDF-"sv, "a PDF", "convert it to text"},
    };
    for (const auto& k : known)
        if (text.size() >= k.at && text.compare(k.at, k.bytes.size(), k.bytes) == 0)
            throw Error(
                format("%s: is no text but looks like %s; %s", path.c_str(), k.what, k.advice));
    if (const size_t zero = text.find('\0'); zero != std::string::npos)
        throw Error(format(
            "%s: is no text, for it has a zero byte at offset %zu; give UTF-8 text or token shards",
            path.c_str(), zero));
}

std::vector<std::string> split(const std::string& text, const std::string& separator) {
    std::vector<std::string> parts;
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + separator.size()) {
        end = text.find(separator, begin);
        parts.push_back(text.substr(begin, end == std::string::npos ? end : end - begin));
    }
    return parts;
}

// Nothing but white space, as Python's str.isspace() counts it.
static bool is_blank(const std::string& text) {
    for (size_t at = 0; at < text.size();) {
        const Character c = character(text, at);
        if (c.bytes == 0 || !(is_white_space(text, at) || (c.code >= 0x1C && c.code <= 0x1F)))
            return false;
        at += c.bytes;
    }
    return true;
}

std::vector<std::string> documents(const std::string& text) {
    const std::string mark = "\xEF\xBB\xBF";
    std::vector<std::string> parts = split(
        text.compare(0, mark.size(), mark) ? text : text.substr(mark.size()), kEndOfTextPiece);
    std::vector<std::string> found;
    for (size_t i = 0; i < parts.size(); i++) {
        std::string& part = parts[i];
        // A line end between two separators belongs to the first.
        if (i > 0)
            part.erase(0, part.compare(0, 1, "\n") == 0     ? 1
                          : part.compare(0, 2, "\r\n") == 0 ? 2
                                                            : 0);
        if (i + 1 < parts.size() && !part.empty() && part.back() == '\n') {
            part.pop_back();
            if (!part.empty() && part.back() == '\r')
                part.pop_back();
        }
        if (!is_blank(part))
            found.push_back(std::move(part));
    }
    return found;
}

std::string shell_quoted(const std::string& text) {
    static const char plain[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+:,./-";
    if (!text.empty() && text.find_first_not_of(plain) == std::string::npos)
        return text;
    std::string quoted = "'";
    for (const char c : text)
        quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return quoted + "'";
}

std::string shell_quoted_path(const std::string& path) {
    return shell_quoted(path.compare(0, 1, "-") == 0 ? "./" + path : path);
}

std::string glob_escaped(const std::string& path) {
    std::string escaped;
    for (const char c : path) {
        if (std::strchr("*?[]\\", c))
            escaped += '\\';
        escaped += c;
    }
    return escaped;
}
