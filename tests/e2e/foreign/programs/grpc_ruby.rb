# Makes calls with the gem grpc, without generated code.
require "base64"
require "grpc"
require "json"
require "zlib"

BLOCK = 65_521
CODES = GRPC::Core::StatusCodes.constants.to_h { |name| [GRPC::Core::StatusCodes.const_get(name), name] }
RETRIES = {methodConfig: [{name: [{}], retryPolicy: {
  maxAttempts: 4, initialBackoff: "0.1s", maxBackoff: "1s", backoffMultiplier: 2, retryableStatusCodes: ["UNAVAILABLE"]
}}]}
SAME = ->(bytes) { bytes }

def open_stub(connection, compression)
  options = {"grpc.max_receive_message_length" => -1}
  if connection["keepalive_ms"] > 0
    options["grpc.keepalive_time_ms"] = connection["keepalive_ms"]
    options["grpc.http2.max_pings_without_data"] = 0
  end
  options["grpc.service_config"] = JSON.generate(RETRIES) if connection["retries"]
  if compression
    options.update(GRPC::Core::CompressionOptions.new(default_algorithm: compression.to_sym).to_channel_arg_hash)
  end
  credentials = :this_channel_is_insecure
  unless connection["ca"].empty?
    files = %w[ca key certificate].map { |name| File.read(connection[name]) unless connection[name].empty? }
    credentials = GRPC::Core::ChannelCredentials.new(*files)
  end
  GRPC::ClientStub.new(connection["address"], credentials, channel_args: options)
end

# The bytes that `fill` of a request stands for.
def pattern(size)
  x = 1
  block = Array.new(BLOCK) { (x = (x * 1_664_525 + 1_013_904_223) & 0xFFFFFFFF) >> 24 }.pack("C*")
  (block * (size / BLOCK + 1)).byteslice(0, size)
end

def request(described)
  Base64.decode64(described["head"]) + pattern(described.fetch("fill", 0))
end

def response(message, tail)
  cut = message.bytesize - tail
  {head: Base64.strict_encode64(message.byteslice(0, cut)), crc32: Zlib.crc32(message.byteslice(cut, tail))}
end

# Requests one by one: each is sent once it was added, and nil is the half-close.
class Turns
  def initialize
    @requests = Queue.new
  end

  def add(request)
    @requests << request
  end

  def each
    while (request = @requests.pop)
      yield request
    end
  end
end

def metadata(call)
  call.fetch("metadata", []).to_h do |name, value|
    [name, name.end_with?("-bin") ? Base64.decode64(value) : value]
  end
end

def make(stub, call)
  requests = call["requests"].map { |described| request(described) }
  options = {return_op: true, metadata: metadata(call)}
  options[:deadline] = Time.now + call["timeout_ms"] / 1000.0 if call["timeout_ms"]
  responses = []
  turns = Turns.new
  left = [*requests, nil]
  begin
    arguments = [call["method"], requests[0], SAME, SAME]
    case call["kind"]
    when "unary"
      operation = stub.request_response(*arguments, **options)
      responses << response(operation.execute, call.fetch("tail", 0))
    when "server_stream"
      operation = stub.server_streamer(*arguments, **options)
    else
      arguments[1] = turns
      operation = stub.bidi_streamer(*arguments, **options)
      turns.add(left.shift) until left.empty? || (call["turns"] && left.size == requests.size)
    end
    unless call["kind"] == "unary"
      operation.execute.each do |message|
        responses << response(message, call.fetch("tail", 0))
        turns.add(left.shift) if call["turns"]
        break if responses.size == call["leave_after"]

        operation.cancel if responses.size == call["cancel_after"]
      end
    end
    return result("LEFT", "", responses) if call["leave_after"]

    result("OK", "", responses, operation.trailing_metadata)
  rescue GRPC::BadStatus => error
    turns.add(nil)
    result(CODES[error.code], error.details, responses, error.metadata)
  end
end

def result(code, message, responses, trailers = {})
  named = trailers.to_h { |name, value| [name, name.end_with?("-bin") ? Base64.strict_encode64(value) : value] }
  {code: code, message: message.dup.force_encoding("UTF-8"), responses: responses, trailers: named}
end

# Makes a call, or makes it again and again: the result is that of the first that failed, or of the last.
def repeat(stub, call)
  time = -> { Process.clock_gettime(Process::CLOCK_MONOTONIC) }
  last_start = time.call + call.fetch("repeat_seconds", 0)
  results = [make(stub, call)]
  results << make(stub, call) while time.call < last_start
  shown = results.find { |made| made[:code] != "OK" } || results.last
  {**shown, codes: results.map { |made| made[:code] }.tally}
end

connection = JSON.parse(ARGV[0])
stubs = Hash.new { |made, compression| made[compression] = open_stub(connection, compression) }
$stdout.sync = true
$stdin.each_line do |line|
  call = JSON.parse(line)
  puts JSON.generate(repeat(stubs[call["compression"]], call))
end
