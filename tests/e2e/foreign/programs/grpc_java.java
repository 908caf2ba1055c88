import com.google.gson.FieldNamingPolicy;
import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import io.grpc.*;
import io.grpc.netty.GrpcSslContexts;
import io.grpc.netty.NettyChannelBuilder;
import io.netty.channel.epoll.EpollDomainSocketChannel;
import io.netty.channel.epoll.EpollEventLoopGroup;
import io.netty.channel.unix.DomainSocketAddress;
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.util.*;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.zip.CRC32;

/** Makes calls with grpc-java, without generated code. */
final class GrpcJava {
    static final int BLOCK = 65521;
    static final Gson GSON =
        new GsonBuilder().setFieldNamingPolicy(FieldNamingPolicy.LOWER_CASE_WITH_UNDERSCORES).create();
    static final String RETRIES = """
        {"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.1s",
         "maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]}""";
    static final Map<String, MethodDescriptor.MethodType> TYPES = Map.of(
        "unary", MethodDescriptor.MethodType.UNARY,
        "server_stream", MethodDescriptor.MethodType.SERVER_STREAMING,
        "bidi", MethodDescriptor.MethodType.BIDI_STREAMING);

    static final class Connection {
        String address, ca, certificate, key;
        long keepaliveMs;
        boolean retries;
    }

    static final class Request {
        String head;
        int fill;
    }

    static final class Call {
        String method, kind, compression;
        List<Request> requests;
        List<List<String>> metadata = List.of();
        Long timeoutMs;
        boolean turns;
        int cancelAfter, leaveAfter, tail;
        double repeatSeconds;
    }

    static final class Result {
        String code, message = "";
        final List<Map<String, Object>> responses = new ArrayList<>();
        final Map<String, String> trailers = new HashMap<>();
        Map<String, Integer> codes;
    }

    /** Messages are bytes. */
    static final class Bytes implements MethodDescriptor.Marshaller<byte[]> {
        @Override
        public InputStream stream(byte[] value) {
            return new ByteArrayInputStream(value);
        }

        @Override
        public byte[] parse(InputStream stream) {
            try {
                return stream.readAllBytes();
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    }

    /** Values of -bin metadata are base64. */
    static final class Base64Text implements Metadata.BinaryMarshaller<String> {
        @Override
        public byte[] toBytes(String value) {
            return Base64.getDecoder().decode(value);
        }

        @Override
        public String parseBytes(byte[] bytes) {
            return Base64.getEncoder().encodeToString(bytes);
        }
    }

    static Metadata.Key<String> key(String name) {
        return name.endsWith("-bin")
            ? Metadata.Key.of(name, new Base64Text())
            : Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
    }

    static ManagedChannel open(Connection connection) throws IOException {
        NettyChannelBuilder builder;
        if (connection.address.startsWith("unix:")) {
            builder = NettyChannelBuilder.forAddress(new DomainSocketAddress(connection.address.substring(5)))
                .channelType(EpollDomainSocketChannel.class)
                .eventLoopGroup(new EpollEventLoopGroup());
        } else {
            builder = NettyChannelBuilder.forTarget(connection.address);
        }
        if (connection.ca.isEmpty()) {
            builder.usePlaintext();
        } else {
            var tls = GrpcSslContexts.forClient().trustManager(new File(connection.ca));
            if (!connection.certificate.isEmpty()) {
                tls.keyManager(new File(connection.certificate), new File(connection.key));
            }
            builder.sslContext(tls.build());
        }
        if (connection.keepaliveMs > 0) {
            builder.keepAliveTime(connection.keepaliveMs, TimeUnit.MILLISECONDS).keepAliveWithoutCalls(true);
        }
        if (connection.retries) {
            builder.enableRetry().defaultServiceConfig(GSON.<Map<String, Object>>fromJson(RETRIES, Map.class));
        }
        return builder.maxInboundMessageSize(Integer.MAX_VALUE).build();
    }

    /** A request's bytes: its head, and the pattern that `fill` stands for. */
    static byte[] bytes(Request request) {
        byte[] head = Base64.getDecoder().decode(request.head);
        byte[] bytes = Arrays.copyOf(head, head.length + request.fill);
        int x = 1;
        for (int at = 0; at < request.fill; at++) {
            x = x * 1664525 + 1013904223;
            bytes[head.length + at] = at < BLOCK ? (byte) (x >>> 24) : bytes[head.length + at - BLOCK];
        }
        return bytes;
    }

    static Map<String, Object> response(byte[] message, int tail) {
        int cut = message.length - tail;
        CRC32 crc = new CRC32();
        crc.update(message, cut, tail);
        String head = Base64.getEncoder().encodeToString(Arrays.copyOf(message, cut));
        return Map.of("head", head, "crc32", crc.getValue());
    }

    static Result make(ManagedChannel channel, Call call) throws Exception {
        MethodDescriptor<byte[], byte[]> method = MethodDescriptor.newBuilder(new Bytes(), new Bytes())
            .setType(TYPES.get(call.kind)).setFullMethodName(call.method.substring(1)).build();
        CallOptions uncompressed = call.timeoutMs == null
            ? CallOptions.DEFAULT
            : CallOptions.DEFAULT.withDeadlineAfter(call.timeoutMs, TimeUnit.MILLISECONDS);
        CallOptions options = uncompressed.withCompression(call.compression);
        // The end of the context cancels a call that has not ended: Java's way to leave a stream.
        try (Context.CancellableContext context = Context.current().withCancellation()) {
            return context.call(() -> exchange(channel.newCall(method, options), call));
        }
    }

    static Result exchange(ClientCall<byte[], byte[]> rpc, Call call) throws InterruptedException {
        Result result = new Result();
        BlockingQueue<Object> received = new LinkedBlockingQueue<>();  // byte[] for each response, then a Status.
        Metadata headers = new Metadata();
        call.metadata.forEach(pair -> headers.put(key(pair.get(0)), pair.get(1)));
        rpc.start(new ClientCall.Listener<byte[]>() {
            @Override
            public void onMessage(byte[] message) {
                received.add(message);
            }

            @Override
            public void onClose(Status status, Metadata trailers) {
                trailers.keys().forEach(name -> result.trailers.put(name, trailers.get(key(name))));
                received.add(status);
            }
        }, headers);
        rpc.request(Integer.MAX_VALUE);
        Iterator<Request> left = call.requests.iterator();
        Runnable send = () -> {
            if (left.hasNext()) {
                rpc.sendMessage(bytes(left.next()));
            } else {
                rpc.halfClose();
            }
        };
        for (int sent = 0; sent <= (call.turns ? 0 : call.requests.size()); sent++) {
            send.run();
        }
        while (true) {
            Object event = received.take();
            if (event instanceof Status status) {
                result.code = status.getCode().name();
                result.message = Objects.requireNonNullElse(status.getDescription(), "");
                return result;
            }
            result.responses.add(response((byte[]) event, call.tail));
            if (call.turns) {
                send.run();
            }
            if (result.responses.size() == call.leaveAfter) {
                result.code = "LEFT";
                return result;
            }
            if (result.responses.size() == call.cancelAfter) {
                rpc.cancel("cancelled", null);
            }
        }
    }

    /** Makes a call, or makes it again and again: the result is that of the first that failed, or of the last. */
    static Result repeat(ManagedChannel channel, Call call) throws Exception {
        long end = System.nanoTime() + (long) (call.repeatSeconds * 1e9);
        Map<String, Integer> codes = new HashMap<>();
        Result shown = null;
        do {
            Result last = make(channel, call);
            codes.merge(last.code, 1, Integer::sum);
            if (shown == null || shown.code.equals("OK")) {
                shown = last;
            }
        } while (System.nanoTime() < end);
        shown.codes = codes;
        return shown;
    }

    public static void main(String[] words) throws Exception {
        var calls = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        var results = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        ManagedChannel channel = null;
        Result unsupported = new Result();
        try {
            channel = open(GSON.fromJson(words[0], Connection.class));
        } catch (UnsatisfiedLinkError error) {
            unsupported.code = "UNSUPPORTED";
            unsupported.message = error.getMessage();
        }
        for (String line = calls.readLine(); line != null; line = calls.readLine()) {
            Call call = GSON.fromJson(line, Call.class);
            results.println(GSON.toJson(channel == null ? unsupported : repeat(channel, call)));
        }
        System.exit(0);
    }
}
