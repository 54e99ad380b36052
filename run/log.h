// log.jsonl, one JSON object per line, and how a run prints a model's text.
//
// Each row is appended with one write() at once, so that the rows in the file stay valid whatever
// happens next.
#pragma once
#include <atomic>
#include <memory>
#include <string>

#include "data/file.h"

// Makes text safe for a terminal: bytes that are not UTF-8, and control characters except newline
// and tab, become U+FFFD.
std::string for_terminal(const std::string& text);

// Removes all complete characters from the beginning of `text`, and returns them as for_terminal()
// does. At most the first bytes of an incomplete character are left.
std::string take_for_terminal(std::string& text);

// Prints a model's text on stdout, piece by piece: unchanged to a file or a pipe, safe for a
// terminal on a terminal. There it holds back a character until it has all of its bytes.
class TextPrinter {
  public:
    void print(const std::string& piece);
    void end();  // prints what has been held back

  private:
    const bool terminal_ = isatty(STDOUT_FILENO);
    std::string waiting_;
};

void print_text(const std::string& text);  // a whole text, by a TextPrinter

std::string minutes(double seconds);  // 83 → "1:23"

// A line of the log. Row("train").add("step", 3).add("loss", 2.5).text() is {"kind": "train",
// "step": 3, "loss": 2.5}
class Row {
  public:
    explicit Row(const char* kind);
    Row& add(const char* key, double value);              // NaN and inf become null
    Row& add(const char* key, const std::string& value);  // is escaped
    Row& add(const char* key, const char* value) { return add(key, std::string(value)); }
    Row& add(const char* key, int value) { return put(key, std::to_string(value)); }
    Row& add(const char* key, long long value) { return put(key, std::to_string(value)); }
    Row& add(const char* key, bool value) { return put(key, value ? "true" : "false"); }
    std::string text() const { return text_ + "}"; }

  private:
    Row& put(const char* key, const std::string& json);
    std::string text_;
};

// Appends rows to a file. A write that fails, on a full disk for example, throws an Error. The rows
// in the file stay valid, and the next call tries again to write the missing ones.
class Log {
  public:
    Log() = default;  // writes nowhere until open() is called
    explicit Log(const std::string& path, bool append = true) { open(path, append); }
    Log(const Log&) = delete;
    Log& operator=(const Log&) = delete;

    void open(const std::string& path, bool append);
    void write(const Row& row);
    void retry();  // writes what could not be written before

    // Another thread may call these two. An error of sync() is thrown by the next call of write()
    // or retry(), because it must not keep a checkpoint from being written.
    void sync();
    void warn_if_replaced();

    // Drops the rows of steps after `step`, which a resumed run is about to write again, and the
    // rows without a step that follow them. Also drops rows that are not JSON, such as a last row
    // that a crash has cut off, and says on stderr how many. If all dropped rows are at the end,
    // which is so in a log that only runs have written, the file is truncated in place. Then all
    // links to it still lead to the same file.
    static void truncate_after(const std::string& path, long long step);

  private:
    void write_pending();

    std::unique_ptr<HeldFile> file_;
    std::string pending_;  // rows that have not been written
    std::atomic<int> sync_error_ = 0;
};
