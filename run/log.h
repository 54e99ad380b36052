// log.jsonl: one JSON object a line, appended and flushed at once, so that written rows stay valid
// whatever comes next.
#pragma once
#include <atomic>
#include <memory>
#include <string>

#include "data/file.h"

// Text for a terminal. What is not UTF-8 becomes U+FFFD, and control characters do too except
// newline and tab.
std::string for_terminal(const std::string& text);

// Prints a model's text on stdout, piece by piece: into a file or a pipe as it is, on a terminal as
// for_terminal() has it. There a character waits until all of its bytes have come.
class TextPrinter {
  public:
    void print(const std::string& piece);
    void end();  // prints what still waits

  private:
    const bool terminal_ = isatty(STDOUT_FILENO);
    std::string waiting_;
};

void print_text(const std::string& text);  // the same of a whole text

// Takes from the beginning of `text` what for_terminal() can tell, and leaves the first bytes of a
// character until the others are there.
std::string take_for_terminal(std::string& text);

std::string minutes(double seconds);  // 83 → "1:23"

// Builds a line, for example Row("train").add("step", 3).add("loss", 2.5).text()
class Row {
  public:
    explicit Row(const char* kind);                       // {"kind": kind
    Row& add(const char* key, double value);              // NaN and inf as null
    Row& add(const char* key, const std::string& value);  // escaped
    Row& add(const char* key, const char* value) { return add(key, std::string(value)); }
    Row& add(const char* key, int value) { return put(key, std::to_string(value)); }
    Row& add(const char* key, long long value) { return put(key, std::to_string(value)); }
    Row& add(const char* key, bool value) { return put(key, value ? "true" : "false"); }
    std::string text() const { return text_ + "}"; }

  private:
    Row& put(const char* key, const std::string& json);
    std::string text_;
};

// Appends rows to a file. A failing write (a full disk) throws Error. Rows already written stay,
// and the next call tries the others again.
class Log {
  public:
    Log() = default;  // writes nowhere
    explicit Log(const std::string& path, bool append = true) { open(path, append); }
    void open(const std::string& path, bool append);
    Log(const Log&) = delete;
    Log& operator=(const Log&) = delete;
    void write(const Row& row);
    void retry();  // what could not be written

    // Another thread may call these two. What goes wrong with sync() is thrown by the next call of
    // write() or retry(), because it must not keep a checkpoint from being written.
    void sync();
    void warn_if_replaced();

    // Drops rows with "step" greater than `step`, because a resumed run is about to write them
    // again, and with them the rows without a step that follow. Drops rows that are no JSON too,
    // such as a last one that a crash has cut, and says on stderr how many. Rows to drop are at the
    // end of what a run has written, so the file itself becomes shorter, whatever leads to it.
    static void truncate_after(const std::string& path, long long step);

  private:
    void write_pending();

    std::unique_ptr<HeldFile> file_;
    std::string pending_;
    std::atomic<int> sync_error_ = 0;
};
