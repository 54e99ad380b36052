#include "data/text.h"

#include <cstring>
#include <string_view>

#include "common/error.h"
#include "data/tokenizer.h"

using namespace std::string_view_literals;

void check_is_text(const std::string& text, const std::string& path) {
    struct Format {
        size_t offset;
        std::string_view bytes;
        const char* name;
        const char* advice;
    };
    // UTF-32's byte order mark starts with UTF-16's, so UTF-32 is tested first.
    static constexpr Format kFormats[] = {
        {0, "\x93NUMPY"sv, "a NumPy array", "convert its token ids to token shards"},
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
        {0, "PAR1"sv, "Parquet", "convert it to token shards with data/prepare.py"},
        {0, "%PDF-"sv, "a PDF", "convert it to text"},
    };
    for (const Format& f : kFormats) {
        const bool matches =
            text.size() >= f.offset && text.compare(f.offset, f.bytes.size(), f.bytes) == 0;
        if (matches)
            throw Error(
                format("%s: is not text, but looks like %s; %s", path.c_str(), f.name, f.advice));
    }

    const size_t zero = text.find('\0');
    if (zero != std::string::npos)
        throw Error(format(
            "%s: is not text, because there is a zero byte at offset %zu; give UTF-8 text or token "
            "shards",
            path.c_str(), zero));
}

std::vector<std::string> split(const std::string& text, const std::string& separator) {
    std::vector<std::string> parts;
    size_t begin = 0;
    for (;;) {
        const size_t end = text.find(separator, begin);
        if (end == std::string::npos)
            break;
        parts.push_back(text.substr(begin, end - begin));
        begin = end + separator.size();
    }
    parts.push_back(text.substr(begin));
    return parts;
}

// Whether there is nothing but white space, as Python's str.isspace() counts it.
static bool is_blank(const std::string& text) {
    size_t at = 0;
    while (at < text.size()) {
        const Character c = character(text, at);
        // Python also counts the separators of files, groups, records and units.
        const bool separator = c.code >= 0x1C && c.code <= 0x1F;
        if (c.bytes == 0 || !(is_white_space(text, at) || separator))
            return false;
        at += c.bytes;
    }
    return true;
}

static void drop_leading_line_end(std::string& text) {
    if (text.starts_with('\n'))
        text.erase(0, 1);
    else if (text.starts_with("\r\n"))
        text.erase(0, 2);
}

static void drop_trailing_line_end(std::string& text) {
    if (!text.ends_with('\n'))
        return;
    text.pop_back();
    if (text.ends_with('\r'))
        text.pop_back();
}

std::vector<std::string> documents(const std::string& text) {
    const std::string byte_order_mark = "\xEF\xBB\xBF";
    const bool marked = text.starts_with(byte_order_mark);
    std::vector<std::string> parts =
        split(marked ? text.substr(byte_order_mark.size()) : text, kEndOfTextPiece);

    std::vector<std::string> found;
    for (size_t i = 0; i < parts.size(); i++) {
        const bool is_first = i == 0;
        const bool is_last = i + 1 == parts.size();
        std::string& part = parts[i];
        // If there is only one line end between two separators, it belongs to the first.
        if (!is_first)
            drop_leading_line_end(part);
        if (!is_last)
            drop_trailing_line_end(part);
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
    for (const char c : text) {
        if (c == '\'')
            quoted += "'\\''";
        else
            quoted += c;
    }
    return quoted + "'";
}

std::string shell_quoted_path(const std::string& path) {
    return shell_quoted(path.starts_with('-') ? "./" + path : path);
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
